"""The work of the programs after their options are read; loads torch and hivemind."""

"""What programs do once their options are read; loads torch and hivemind."""

"""Worker processes of one peer: started, asked, watched, and brought back to where they were."""

"""The pages, one for each entry of the sidebar."""

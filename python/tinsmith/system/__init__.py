"""What all the rest stands on: files and folders that change whole or not at all, locks, places."""

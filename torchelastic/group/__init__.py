"""What ranks say to each other about checkpoints and deadlines, and who is named if one is missing."""

"""velastic: `BCPState`, to save and resume model, optimizer, random numbers and a script's own values in few calls."""

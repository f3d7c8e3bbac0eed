"""Model, optimizer, random numbers and a script's own values, saved and resumed by a few calls: `state.BCPState`."""

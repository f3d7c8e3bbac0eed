"""A small GPT on the characters of any text, in the shape that users of nanoGPT know, that survives its deadlines."""

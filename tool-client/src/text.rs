//! The words that the model reads, made from values and from nothing else.

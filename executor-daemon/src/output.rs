//! The bytes that commands write: moved by `splice` into a ring that survives this process, kept as an exact tail,
//! spilled to a file when the tail cannot hold them, and read by offset without ever blocking the command.

//! The server process: registry, engine and gRPC.

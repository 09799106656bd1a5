//! The gRPC service: verify, convert, call one engine method, encode.

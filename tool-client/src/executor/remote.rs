//! The executor on another host, over gRPC.

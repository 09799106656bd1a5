//! Support for the behaviour tests.

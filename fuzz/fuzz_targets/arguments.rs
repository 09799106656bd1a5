//! A model's text as the arguments of the tools: never a panic, and what is read prints as what reads the same.
#![no_main]

libfuzzer_sys::fuzz_target!(|text: &str| tool_client::fuzzing::arguments(text));

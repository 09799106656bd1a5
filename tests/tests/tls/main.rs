//! The closed way in: TLS, certificates and tokens, several tenants, and what becomes of whoever does not belong.

mod flood;
mod refusals;
mod reload;
mod rig;
mod tenants;

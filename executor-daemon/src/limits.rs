//! How much is allowed: budgets as permits that are given back when they are dropped.

//! What people see of a call and its result; the model never does.

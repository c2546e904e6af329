//! Parameters: what is counted, where it is refused.

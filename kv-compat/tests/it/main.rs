//! Both interfaces on the null device: bookkeeping, refusals, addresses. Conformance cases check what
//! is stored.
#[cfg(test)]
mod params;
#[cfg(test)]
mod slots;

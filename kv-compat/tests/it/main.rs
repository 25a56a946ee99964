//! Both interfaces on the null device: bookkeeping, refusals, addresses. Conformance cases check
//! what is stored.
#![expect(clippy::as_conversions, reason = "tests count small numbers")]
#[cfg(test)]
mod params;
#[cfg(test)]
mod slots;

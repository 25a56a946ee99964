//! Benches of the cache. `cargo xtask bench` runs them all, `cargo xtask bench attend/` some.
//!
//! Throughput counts the bytes that an operation has to move at the least, in the stored format
//! where it reads or writes the cache; comparing it with the machine's memory bandwidth says what
//! is left.
#![forbid(unsafe_code)]
#![expect(
    clippy::unwrap_used,
    clippy::arithmetic_side_effects,
    reason = "a bench that cannot be set up has nothing to measure"
)]

mod attend;
mod copy;
mod plan;
mod rows;

use criterion::Criterion;

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    plan::benches(&mut criterion);
    attend::benches(&mut criterion);
    rows::benches(&mut criterion);
    copy::benches(&mut criterion);
    criterion.final_summary();
}

/// The CPU, erased as users have it.
fn cpu() -> kv::AnyBackend {
    kv::Device::open("cpu").unwrap()
}

//! Benches of the cache. `cargo xtask bench` runs all of them, `cargo xtask bench attend/` some.
//!
//! Throughput counts the bytes that an operation must move at least, in the stored format where it
//! reads or writes the cache; compare it with the machine's memory bandwidth.
#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a bench that cannot be set up has nothing to measure")]

mod attend;
mod blocks;
mod copy;
mod fork;
mod hits;
mod kernels;
mod plan;
mod rows;
mod states;
mod tiers;

use criterion::Criterion;

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    plan::benches(&mut criterion);
    blocks::benches(&mut criterion);
    fork::benches(&mut criterion);
    hits::benches(&mut criterion);
    attend::benches(&mut criterion);
    rows::benches(&mut criterion);
    states::benches(&mut criterion);
    copy::benches(&mut criterion);
    tiers::benches(&mut criterion);
    criterion.final_summary();
    kernels::benches();
}

/// Returns the stored formats to compare: one of every kind. Formats with given scales decode like
/// their relatives with row scales.
fn compared() -> impl Iterator<Item = kv::KvFormat> {
    let names = [
        "bf16",
        "fp8-e4m3-row",
        "fp8-e5m2-row",
        "int8",
        "l6",
        "l4",
        "l4-g32",
        "l3",
        "q8_0",
        "q4_0",
    ];
    names.into_iter().map(|name| name.parse().unwrap())
}

/// Opens the CPU, type-erased as for users.
fn cpu() -> kv::backend::AnyBackend {
    kv::Device::open("cpu").unwrap()
}

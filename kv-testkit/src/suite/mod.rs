//! The list of conformance cases. Each is a plain function that runs on every backend.
//!
//! This is `copy/fork_then_child_writes`, shortened and with comments:
//!
//! ```text
//! fn child_writes<B: Device>(backend: &B) -> CaseResult {
//!     for len in LENGTHS {
//!         // A cache on the device, filled with NaN, and the naive model that it must equal.
//!         let mut fixture = CacheFixture::new(backend, small().build()?, 1)?;
//!         // Sequence 1 with `len` random tokens, and sequence 2, which shares its blocks.
//!         fixture.fill(1, len)?;
//!         fixture.fork(1, 2)?;
//!         // A step with a token of sequence 2: write, attend and commit. The fixture compares
//!         // positions with the model, and outputs with the oracle in f64.
//!         fixture.step(&[(2, StepKind::Tokens(1))], &StepConfig::default())?;
//!         // Compare all lengths and cached rows; `at` names the input if they differ.
//!         fixture.check().at(format!("fork at {len}"))?;
//!     }
//!     // `Outcome::Unsupported(reason)` where a device cannot run the case.
//!     Ok(Outcome::Holds)
//! }
//! ```
//!
//! To add a case, write such a function in the module of its area and add a line to `cases()`
//! there: `case("copy/fork_then_child_writes", child_writes)`. It takes `&AnyBackend`, except in
//! the areas of [`typed_cases`]. Then break what it checks and see it fail.
//! `cargo xtask conformance -- copy/fork` runs the cases whose names contain this.
mod attend;
mod buffer;
mod cache;
mod compat;
mod convert;
mod copy;
mod edges;
mod failure;
mod gather;
mod masked;
mod quant;
mod queue;
mod random;
mod reuse;
mod scale;
mod segments;
mod stateful;
mod states;
mod suffix;
mod tier;
mod write;

use kv_core::spec::CacheSpecBuilder;
use kv_core::{BlockOrder, CacheSpec, KvFormat};

use crate::case::{Case, CaseResult};
use crate::device::Device;
pub(crate) use convert::{End, convert};
pub(crate) use gather::{Form, check as check_gather};
pub(crate) use quant::{ConstantRanges, constants};
pub(crate) use scale::bytes;

/// Makes a named case.
fn case<B: Device>(name: &'static str, run: fn(&B) -> CaseResult) -> Case<B> {
    Case { name, run }
}

/// Returns every case, on a backend whose type is erased, as users hold it.
///
/// Not generic, so that the suite is compiled once, with this crate, and not once for each backend.
pub(crate) fn cases() -> Vec<Case> {
    let areas = [
        typed_cases(),
        attend::cases(),
        masked::cases(),
        suffix::cases(),
        edges::cases(),
        segments::cases(),
        cache::cases(),
        scale::cases(),
        compat::cases(),
        failure::cases(),
        quant::cases(),
        random::cases(),
        stateful::cases(),
        states::cases(),
        reuse::cases(),
    ];
    areas.into_iter().flatten().collect()
}

/// Returns the cases that also run on the backend's own type: each call of the contract, with
/// handles and lists of buffers whose types are known.
pub(crate) fn typed_cases<B: Device>() -> Vec<Case<B>> {
    let areas = [
        buffer::cases(),
        queue::cases(),
        write::cases(),
        attend::typed_cases(),
        copy::cases(),
        gather::cases(),
        convert::cases(),
        tier::cases(),
        failure::typed_cases(),
    ];
    areas.into_iter().flatten().collect()
}

/// A small geometry: 2 layers, 2 kv heads, head dims of 8, f32, 16 blocks of 4 tokens.
fn small() -> CacheSpecBuilder {
    CacheSpec::builder().layers(2).kv_heads(2).head_dim(8).format(KvFormat::F32).paged(4, 16)
}

/// Orders of the axes inside a block.
pub(crate) const ORDERS: [BlockOrder; 2] = [BlockOrder::Nhd, BlockOrder::Hnd];

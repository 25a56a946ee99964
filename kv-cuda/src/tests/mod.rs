//! Kernels on the emulated GPU with hand-made parameters; memory and its order.
#![expect(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "small numbers, and overflow checks are on"
)]
mod buffers;
mod device;
mod freed;
pub(crate) mod late;
mod moves;
mod plans;
pub(crate) mod random;
mod rows;
mod tails;

//! Bad input: refused with a typed error, before anything changes.
use super::case;
use crate::case::{Case, CaseResult, Outcome};
use crate::device::Device;

pub(super) fn cases<B: Device>() -> Vec<Case<B>> {
    vec![case("failure/stub", stub)]
}
fn stub<B: Device>(_: &B) -> CaseResult { Ok(Outcome::Holds) }

//! Options for recurrent states, and their values.
use clap::Args;
use kv::DType;
use kv::error::UnknownName;
use kv::spec::StateFormat;

use super::at_least_1;
use crate::replay::{Policy, StateOptions};
use crate::snapshot_pool::SnapshotPool;

/// Arguments of `kv replay` for a model with recurrent states.
#[derive(Debug, Clone, Args)]
pub(crate) struct ReplayStateArgs {
    /// Bytes of a snapshot of a model's recurrent states, as `kv plan` prints them: a prompt then
    /// reuses rows only up to a length at which a snapshot is kept
    #[arg(long, value_name = "N", value_parser = at_least_1, requires = "bytes_per_token",
        conflicts_with = "tier")]
    pub(crate) state_bytes: Option<u32>,

    /// Snapshots: a share of the memory of --capacity-blocks, such as 15%, or their number; blocks
    /// take the rest; may be repeated. Default: 10%, 15%, 20% and 30%
    #[arg(long, value_name = "PERCENT|COUNT", requires = "state_bytes")]
    pub(crate) snapshots: Vec<SnapshotPool>,

    /// Keep snapshots behind multiples of N tokens alone. Default: the tokens of an id or of a
    /// block, whichever is more: in between, a trace does not say which tokens prompts share
    #[arg(long, value_name = "N", value_parser = at_least_1, requires = "state_bytes")]
    pub(crate) state_grid: Option<u32>,
}

impl ReplayStateArgs {
    /// Returns the states of a model with these bytes per token, `None` without states.
    pub(crate) fn options(
        &self,
        bytes_per_token: Option<u32>,
        policies: &[Policy],
    ) -> Result<Option<StateOptions>, MinOfStates> {
        let Some((snapshot_bytes, bytes_per_token)) = self.state_bytes.zip(bytes_per_token) else {
            return Ok(None);
        };
        if policies.contains(&Policy::Min) {
            return Err(MinOfStates);
        }
        let shares = StateOptions::SHARES;
        let pools = if self.snapshots.is_empty() { &shares[..] } else { &self.snapshots };
        let (pools, grid) = (pools.to_vec(), self.state_grid);
        Ok(Some(StateOptions { bytes_per_token, snapshot_bytes, pools, grid }))
    }
}

/// The policy `min` with states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("--policy min knows when blocks are used next, not snapshots: leave out --state-bytes")]
pub(crate) struct MinOfStates;

/// Element types that a part of a state may have, by name.
const TYPES: [(&str, DType); 3] = [("f32", DType::F32), ("f16", DType::F16), ("bf16", DType::Bf16)];

/// Parses an element type of a part of a state.
pub(super) fn element_type(name: &str) -> Result<DType, UnknownName> {
    let found = TYPES.iter().find(|(known, _)| *known == name).map(|(_, dtype)| *dtype);
    found.ok_or_else(|| UnknownName::new("element type", name, "f32, f16, bf16"))
}

/// Returns the name of an element type of a part of a state.
pub(crate) fn type_name(dtype: DType) -> &'static str {
    TYPES.iter().find(|(_, known)| *known == dtype).map_or("other", |(name, _)| name)
}

/// Parses the format of snapshots.
pub(super) fn state_format(name: &str) -> Result<StateFormat, UnknownName> {
    match name {
        "same" => Ok(StateFormat::Same),
        "f16" => Ok(StateFormat::F16),
        "int8" => Ok(StateFormat::Int8),
        _ => Err(UnknownName::new("format of snapshots", name, "same, f16, int8")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_and_formats_have_names() {
        for (name, dtype) in TYPES {
            assert_eq!(element_type(name).ok(), Some(dtype));
            assert_eq!(type_name(dtype), name);
        }
        assert!(element_type("f8").expect_err("f8").to_string().contains("f32, f16, bf16"));
        assert_eq!(state_format("same").ok(), Some(StateFormat::Same));
        assert_eq!(state_format("int8").ok(), Some(StateFormat::Int8));
        assert!(state_format("l4").expect_err("l4").to_string().contains("same, f16, int8"));
    }
}

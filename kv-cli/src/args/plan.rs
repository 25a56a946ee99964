//! Arguments of `kv plan`.
use std::path::PathBuf;

use clap::Args;
use kv::DType;
use kv::quant::Stored;
use kv::spec::StateFormat;
use kv::tier::Bytes;

use super::at_least_1;
use super::states::{element_type, state_format};
use crate::snapshot_pool::SnapshotPool;

/// Print how much memory a model's cache takes and how many sequences fit, from its config.json or
/// GGUF metadata only.
///
/// Layers, kv heads, their sizes, windows, MLA ranks and recurrent states are read for any decoder,
/// whether `kv generate` runs it or not; an unknown type is planned from the usual fields, with a
/// note. Layers whose states are not known are named and not counted. For MLA, bytes/token is what
/// the model needs; the other columns count what this cache stores.
///
/// Of a model with recurrent states, the memory is shared by the blocks of rows, the slots of
/// running states and the snapshots from which other prompts go on. A sequence takes a slot, one
/// more in a step, and one for each of its drafts.
#[derive(Debug, Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Examples:
  kv plan --model models/stories260K
  kv plan --model model-00001-of-00003.gguf --format bf16 --context 131072
  kv plan --model path/to/llama --memory 80GB --context 32768 --format l4 --format int8/l4 --json
  kv plan --model path/to/qwen3.5 --memory 80GB --format bf16 --sequences 64 --snapshots 20%"
)]
pub(crate) struct PlanArgs {
    /// Directory with a config.json or one GGUF model, or such a file; default: the bundled
    /// stories260K
    #[arg(long, value_name = "DIR|FILE")]
    pub(crate) model: Option<PathBuf>,

    /// Stored format of K and V, such as l4, int8/l4 (K/V) or l4,full-precision-prefix=0; may be
    /// repeated; default: all formats
    #[arg(long, value_name = "NAME[,..]")]
    pub(crate) format: Vec<Stored>,

    /// Memory for the cache: a number of bytes, or with KB, MB, GB, TB (powers of 1000) or KiB,
    /// MiB, GiB, TiB (powers of 1024)
    #[arg(long, value_name = "SIZE", default_value = "24GiB")]
    pub(crate) memory: Bytes,

    /// Tokens per sequence; default: the model's context
    #[arg(long, value_name = "N", value_parser = at_least_1)]
    pub(crate) context: Option<u32>,

    /// Tokens per block
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = at_least_1)]
    pub(crate) block_size: u32,

    #[command(flatten)]
    pub(crate) states: StateArgs,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// Pools of recurrent states.
#[derive(Debug, Clone, Copy, Args)]
#[command(next_help_heading = "Models with recurrent states")]
pub(crate) struct StateArgs {
    /// Sequences that run at once, which need slots for their states; default: as many as fit with
    /// their whole context, at least 1
    #[arg(long, value_name = "N", value_parser = at_least_1)]
    pub(crate) sequences: Option<u32>,

    /// Most draft tokens of a sequence in a step, each of which takes a slot
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) draft_tokens: u32,

    /// Snapshots: a share of the memory, such as 15%, or their number
    #[arg(long, value_name = "PERCENT|COUNT", default_value_t = SnapshotPool::DEFAULT)]
    pub(crate) snapshots: SnapshotPool,

    /// Form of snapshots: same (the element type of the state), f16 for parts in f32, or int8 for
    /// the largest of them (a scale for 32 values) and f16 for the others
    #[arg(long, value_name = "NAME", default_value = "f16", value_parser = state_format)]
    pub(crate) snapshot_format: StateFormat,

    /// Element type of the windows of convolutions: f32, f16 or bf16
    #[arg(long, value_name = "NAME", default_value = "f32", value_parser = element_type)]
    pub(crate) state_window: DType,
}

/// Settings of the pools of recurrent states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StateSettings {
    /// `None` for as many as fit.
    pub(crate) sequences: Option<u32>,
    pub(crate) drafts: u32,
    pub(crate) snapshots: SnapshotPool,
    pub(crate) format: StateFormat,
    pub(crate) window: DType,
}

impl StateArgs {
    /// Returns the settings.
    pub(crate) fn settings(&self) -> StateSettings {
        StateSettings {
            sequences: self.sequences,
            drafts: self.draft_tokens,
            snapshots: self.snapshots,
            format: self.snapshot_format,
            window: self.state_window,
        }
    }

    /// Returns the first option that differs from its default, which a model without recurrent
    /// states has no use for.
    pub(crate) fn first_given(&self) -> Option<&'static str> {
        [
            ("--sequences", self.sequences.is_some()),
            ("--draft-tokens", self.draft_tokens > 0),
            ("--snapshots", self.snapshots != SnapshotPool::DEFAULT),
            ("--snapshot-format", self.snapshot_format != StateFormat::default()),
            ("--state-window", self.state_window != DType::F32),
        ]
        .into_iter()
        .find_map(|(option, is_given)| is_given.then_some(option))
    }
}

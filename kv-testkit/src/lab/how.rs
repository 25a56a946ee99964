//! In what form a step comes.
use kv_core::{AttentionOptions, DType, QkvFormat};

use crate::device::Place;
use crate::lab::LayerShape;
use crate::oracle::Attention;
use crate::rng::Rng;
use crate::tokens::Room;

/// Element types of q, k and v.
pub(crate) const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];
/// Axis orders of q, k and v.
pub(crate) const FORMATS: [QkvFormat; 3] = [QkvFormat::Bshd, QkvFormat::Sbhd, QkvFormat::Thd];

/// How a step ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// Its rows stay.
    Commit,
    /// It never happened.
    Drop,
}

/// Formats, types, places and options of one step.
#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
pub struct How {
    /// Axes of k and v.
    pub kv_format: QkvFormat,
    /// Axes of q and out.
    pub q_format: QkvFormat,
    /// Element type of k and v.
    pub kv_dtype: DType,
    /// Element type of q and out.
    pub q_dtype: DType,
    /// Where k, v and q are.
    pub inputs: Place,
    /// Where out and the log-sum-exp are.
    pub outputs: Place,
    /// Padding of all tensors.
    pub room: Room,
    /// Query heads for each kv head.
    pub group: usize,
    /// Bottom-right causal, or every key.
    pub causal: bool,
    /// Sliding window.
    pub window_left: Option<u32>,
    /// First tokens that are seen besides the window.
    pub sink_tokens: u32,
    /// Soft cap.
    pub soft_cap: Option<f32>,
    /// Whether heads have sink logits.
    pub sink_logits: bool,
    /// Scale of the queries: large for sharp weights.
    pub spread: f32,
    /// Whether the log-sum-exp is asked for.
    pub lse: bool,
    /// Whether layers are written last first, the first one twice.
    pub shuffled: bool,
    /// How it ends.
    pub finish: Finish,
}

impl Default for How {
    fn default() -> Self {
        Self {
            kv_format: QkvFormat::Thd,
            q_format: QkvFormat::Thd,
            kv_dtype: DType::F32,
            q_dtype: DType::F32,
            inputs: Place::Host,
            outputs: Place::Device,
            room: Room::default(),
            group: 2,
            causal: true,
            window_left: None,
            sink_tokens: 0,
            soft_cap: None,
            sink_logits: false,
            spread: 1.0,
            lse: true,
            shuffled: false,
            finish: Finish::Commit,
        }
    }
}

impl How {
    /// Any form, every field by chance.
    pub fn random(rng: &mut Rng) -> Self {
        let places = [Place::Host, Place::Device];
        Self {
            kv_format: rng.pick(&FORMATS),
            q_format: rng.pick(&FORMATS),
            kv_dtype: rng.pick(&DTYPES),
            q_dtype: rng.pick(&DTYPES),
            inputs: rng.pick(&places),
            outputs: rng.pick(&places),
            room: Room {
                batch: rng.below(3) as usize,
                tokens: rng.below(4) as usize,
                gap: rng.pick(&[0, 0, 2, 6]),
            },
            group: rng.pick(&[1, 2, 3]),
            causal: !rng.one_in(5),
            window_left: rng.one_in(3).then(|| rng.pick(&[0, 1, 5, 40])),
            soft_cap: rng.one_in(4).then_some(5.0),
            sink_logits: rng.one_in(4),
            spread: rng.pick(&[0.5, 1.0, 4.0]),
            lse: rng.one_in(2),
            shuffled: rng.one_in(2),
            finish: Finish::Commit,
            sink_tokens: rng.pick(&[0, 1, 3, 9]),
        }
    }

    /// The oracle for a layer of this shape.
    pub(crate) fn oracle(&self, shape: &LayerShape, sink_logits: &[f32]) -> Attention {
        let (heads, dims) = (shape.heads, shape.dims);
        Attention {
            causal: self.causal,
            window_left: self.window_left,
            sink_tokens: self.sink_tokens,
            soft_cap: self.soft_cap,
            sink_logits: self.sink_logits.then(|| sink_logits.to_vec()),
            turn: shape.turn(),
            ..Attention::causal(heads * self.group, heads, dims[0], dims[1])
        }
    }
}

/// The library's options for an oracle.
pub(crate) fn options(oracle: &Attention, format: QkvFormat) -> AttentionOptions<'_> {
    let mut options = if oracle.causal {
        AttentionOptions::causal(oracle.scale)
    } else {
        AttentionOptions::full(oracle.scale)
    };
    if let Some(left) = oracle.window_left {
        options = options.with_window_left(left);
    }
    options = options.with_sink_tokens(oracle.sink_tokens);
    if let Some(cap) = oracle.soft_cap {
        options = options.with_soft_cap(cap);
    }
    if let Some(sink_logits) = &oracle.sink_logits {
        options = options.with_sink_logits(sink_logits);
    }
    options.with_qkv_format(format)
}

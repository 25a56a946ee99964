//! Attention plans and options.
use kv_format::DType;

use crate::block::BlockTables;
use crate::error::{OptionProblem, PlanError};
use crate::geometry::{Axes, PlaneLayout};
use crate::num::{to_u32, to_usize};
use crate::plan::batch::{PlanBuffers, PlannedSequence};
use crate::plan::split::KvSplit;
use crate::storage::PlaneView;
use crate::tensor::{TensorView, TensorViewMut, TokenRequirement, TokenTensor, TokenTensorMut};

/// A batch of queries over cached sequences, checked against one group's tables.
///
/// A backend may index by these guarantees:
/// - every block of every table is inside the plane, and `kv_len` tokens fit each sequence's table,
///   at [`SlotMap::place_in`](crate::backend::SlotMap::place_in) with the sequence's `coded`; the
///   content of a block is defined only if a query sees a key in it, see
///   [`AttentionOptions::visible`];
/// - the splits of a sequence are `splits()[split_start..][..num_splits]`, in order, and cover
///   `0..kv_len` exactly.
#[derive(Debug, Clone, Copy)]
pub struct AttentionPlan<'p> {
    layout: &'p PlaneLayout,
    tables: &'p BlockTables,
    batch: &'p PlanBuffers,
}

impl<'p> AttentionPlan<'p> {
    pub(crate) fn from_checked(
        layout: &'p PlaneLayout,
        tables: &'p BlockTables,
        batch: &'p PlanBuffers,
    ) -> Self {
        Self { layout, tables, batch }
    }
    /// Returns the pool and block geometry that the tables were checked against.
    pub fn layout(&self) -> &'p PlaneLayout {
        self.layout
    }
    /// Returns the block tables of the group.
    pub fn tables(&self) -> &'p BlockTables {
        self.tables
    }
    /// Returns everything planned for this batch, for backends that keep a copy on their device:
    /// writes and attention of every layer share it.
    pub fn batch(&self) -> &'p PlanBuffers {
        self.batch
    }
    /// Returns the batch, in the caller's order.
    pub fn sequences(&self) -> &'p [PlannedSequence] {
        self.batch.sequences()
    }
    /// Returns the KV splits, sequence by sequence.
    pub fn splits(&self) -> &'p [KvSplit] {
        self.batch.splits()
    }
    /// Returns the queries of the whole batch.
    pub fn total_q(&self) -> u32 {
        self.batch.total_q()
    }
    /// Returns the largest number of queries of an entry.
    pub fn q_len_max(&self) -> u32 {
        self.batch.q_len_max()
    }
}

/// The keys that a query sees, before window and length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Mask {
    /// Bottom-right causal: query `i` of `q_len` sees keys `j <= kv_len - q_len + i`.
    Causal,
    /// Every key; for cross-attention over an encoder's K and V.
    Full,
}

/// Settings of attention: scale, mask, window, soft cap, sink tokens and sink logits, and the axes
/// of the tensors.
///
/// ```
/// use kv::AttentionOptions;
/// let options = AttentionOptions::causal(0.125).with_window_left(1023).with_soft_cap(50.0);
/// # let _ = options;
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionOptions<'a> {
    scale: f32,
    mask: Mask,
    window_left: Option<u32>,
    sink_tokens: u32,
    soft_cap: Option<f32>,
    sink_logits: Option<&'a [f32]>,
    axes: Axes,
}

impl<'a> AttentionOptions<'a> {
    /// Creates options for causal attention; `scale` multiplies the scores, usually
    /// `1 / sqrt(head_dim_k)`.
    pub fn causal(scale: f32) -> Self {
        Self {
            scale,
            mask: Mask::Causal,
            window_left: None,
            sink_tokens: 0,
            soft_cap: None,
            sink_logits: None,
            axes: Axes::Thd,
        }
    }
    /// Creates options for attention to every cached key.
    pub fn full(scale: f32) -> Self {
        Self { mask: Mask::Full, ..Self::causal(scale) }
    }
    /// Limits queries to a sliding window: a query at position `p` also needs `j >= p -
    /// window_left`, so it sees at most `window_left + 1` keys (flash-attention's
    /// `window_size_left`).
    #[must_use]
    pub fn with_window_left(self, window_left: u32) -> Self {
        Self { window_left: Some(window_left), ..self }
    }
    /// Lets every query see the first `sink_tokens` tokens of the sequence besides its window: keys
    /// `j < sink_tokens`, as far as mask and length let it. Has no effect without a window.
    /// Positions stay as they are: keys are read as they were stored.
    ///
    /// # Source
    /// Xiao et al., "Efficient streaming language models with attention sinks" (2023).
    #[must_use]
    pub fn with_sink_tokens(self, sink_tokens: u32) -> Self {
        Self { sink_tokens, ..self }
    }
    /// Sets a soft cap `c > 0`: a scaled score `s` becomes `c * tanh(s / c)` before masking (Gemma
    /// 2).
    #[must_use]
    pub fn with_soft_cap(self, soft_cap: f32) -> Self {
        Self { soft_cap: Some(soft_cap), ..self }
    }
    /// Adds one logit for every query head that joins the softmax's denominator and has neither
    /// token nor value (gpt-oss).
    #[must_use]
    pub fn with_sink_logits(self, sink_logits: &'a [f32]) -> Self {
        Self { sink_logits: Some(sink_logits), ..self }
    }
    /// Sets the axes of `q`, `out` and the log-sum-exp; [`Axes::Thd`] unless set.
    #[must_use]
    pub fn with_axes(self, axes: Axes) -> Self {
        Self { axes, ..self }
    }
    /// Returns the factor of the scores.
    pub fn scale(&self) -> f32 {
        self.scale
    }
    /// Returns which keys a query sees.
    pub fn mask(&self) -> Mask {
        self.mask
    }
    /// Returns the number of keys before its own position that a query sees, `None` for all.
    pub fn window_left(&self) -> Option<u32> {
        self.window_left
    }
    /// Returns the number of first tokens that every query sees besides its window.
    pub fn sink_tokens(&self) -> u32 {
        self.sink_tokens
    }
    /// Returns the soft cap of the scores.
    pub fn soft_cap(&self) -> Option<f32> {
        self.soft_cap
    }
    /// Returns the logits without a token, one for every query head.
    pub fn sink_logits(&self) -> Option<&'a [f32]> {
        self.sink_logits
    }
    /// Returns the axes of `q` and `out`.
    pub fn axes(&self) -> Axes {
        self.axes
    }

    /// Returns the keys that query `i` of a sequence sees, without sink tokens before its window:
    /// `begin..end`, empty if it sees none. No bound decreases from one query to the next.
    ///
    /// Together with [`Self::visible_sink_tokens`] these are all visible keys. A block in which no
    /// query of the sequence sees a key is never read: its entry of the block table may name
    /// another owner's block.
    pub fn visible(&self, sequence: &PlannedSequence, i: u32) -> (u32, u32) {
        // The query's position plus one, which is negative if there are more queries than keys.
        let end = i64::from(sequence.kv_len) - i64::from(sequence.q_len) + i64::from(i) + 1;
        let position = end - 1;
        let begin = self.window_left.map_or(0, |left| (position - i64::from(left)).max(0));
        let end = match self.mask {
            Mask::Causal => end.clamp(0, i64::from(sequence.kv_len)),
            Mask::Full => i64::from(sequence.kv_len),
        };
        let begin = begin.min(end);
        (u32::try_from(begin).unwrap_or(0), u32::try_from(end).unwrap_or(0))
    }

    /// Returns the number of sink tokens that query `i` of a sequence sees before its window: keys
    /// `0..n`, where `n` is at most `begin` of [`Self::visible`]. Never decreases from one query to
    /// the next.
    ///
    /// With a window, a kernel that ends a tile at [`Self::sink_tokens`] has one visible range per
    /// tile: `0..end` below that position, and from there on the range of `visible`.
    pub fn visible_sink_tokens(&self, sequence: &PlannedSequence, i: u32) -> u32 {
        let (begin, _) = self.visible(sequence, i);
        self.sink_tokens.min(begin)
    }

    fn check(&self, q_heads: u32) -> Result<(), PlanError> {
        let refuse = |option, problem| Err(PlanError::Option { option, problem });
        if !self.scale.is_finite() {
            return refuse("scale", OptionProblem::NotFinite { got: self.scale });
        }
        match self.soft_cap {
            Some(cap) if !(cap.is_finite() && cap > 0.0) => {
                return refuse("soft_cap", OptionProblem::NotPositive { got: cap });
            }
            _ => {}
        }
        if let Some(sink_logits) = self.sink_logits {
            if sink_logits.len() != to_usize(q_heads) {
                let (what, expected, got) = ("sink_logits", to_usize(q_heads), sink_logits.len());
                return Err(PlanError::LengthMismatch { what, expected, got });
            }
            let is_wrong = |(_, logit): &(usize, &f32)| logit.is_nan() || **logit == f32::INFINITY;
            if let Some((head, got)) = sink_logits.iter().enumerate().find(is_wrong) {
                return refuse("sink_logits", OptionProblem::Logit { head, got: *got });
            }
        }
        Ok(())
    }
}

/// Tensors and planes of one layer's attention, checked against an [`AttentionPlan`].
#[derive(Debug)]
pub struct AttendArgs<'a, Buf> {
    q: TokenTensor<'a, Buf>,
    out: TokenTensorMut<'a, Buf>,
    lse: Option<TokenTensorMut<'a, Buf>>,
    k_plane: PlaneView<'a, Buf>,
    v_plane: PlaneView<'a, Buf>,
    options: AttentionOptions<'a>,
}

impl<'a, Buf> AttendArgs<'a, Buf> {
    /// Checks the tensors of one layer against the plan.
    ///
    /// # Shapes
    /// | argument | axes (for `thd`; `bshd` and `sbhd` alike) | element |
    /// |---|---|---|
    /// | `q` | `[t, num_q_heads, head_dim_k]` | f32, f16, bf16 |
    /// | `out` | `[t, num_q_heads, head_dim_v]` | that of `q` |
    /// | `lse` | `[t, num_q_heads]` | f32; natural logarithm |
    ///
    /// # Errors
    /// Those of [`WriteArgs::new`](crate::plan::WriteArgs::new), and
    /// [`PlanError::HeadsNotDivisible`], [`PlanError::Overlap`], [`PlanError::Option`],
    /// [`PlanError::LengthMismatch`] for the sink logits, or for planes of K and V that are divided
    /// into segments differently.
    pub fn new(
        plan: &AttentionPlan<'_>,
        q: TensorView<'a, Buf>,
        out: TensorViewMut<'a, Buf>,
        lse: Option<TensorViewMut<'a, Buf>>,
        planes: [PlaneView<'a, Buf>; 2],
        options: AttentionOptions<'a>,
    ) -> Result<Self, PlanError> {
        let [k_plane, v_plane] = planes;
        plan.layout.check_same_blocks(k_plane.layout())?;
        plan.layout.check_same_blocks(v_plane.layout())?;
        k_plane.check_constants()?;
        v_plane.check_constants()?;
        let [expected, got] =
            [k_plane, v_plane].map(|plane| to_usize(plane.layout().blocks_per_segment()));
        if expected != got {
            let what = "blocks per segment of V";
            return Err(PlanError::LengthMismatch { what, expected, got });
        }
        let v_heads = v_plane.layout().num_kv_heads();
        let kv_heads = k_plane.layout().num_kv_heads();
        if v_heads != kv_heads {
            return Err(PlanError::HeadsNotDivisible { q_heads: v_heads, kv_heads });
        }
        let need = |tensor, heads, dim| TokenRequirement {
            tensor,
            axes: options.axes,
            batch: to_u32(plan.sequences().len()),
            tokens_max: plan.q_len_max(),
            tokens_total: plan.total_q(),
            heads,
            dim,
        };
        let q = TokenTensor::check(q, &need("q", None, k_plane.layout().head_dim()))?;
        let q_heads = q.rows().heads();
        if q_heads.checked_rem(kv_heads) != Some(0) {
            return Err(PlanError::HeadsNotDivisible { q_heads, kv_heads });
        }
        options.check(q_heads)?;
        let got = out.dtype();
        let dim_v = v_plane.layout().head_dim();
        let out = TokenTensorMut::check(out, &need("out", Some(q_heads), dim_v))?;
        if got != q.rows().dtype() {
            let expected = "the element type of q";
            return Err(PlanError::ElementType { tensor: "out", expected, got });
        }
        let lse = lse.map(|lse| check_lse(lse, &need("lse", Some(q_heads), 1))).transpose()?;
        Ok(Self { q, out, lse, k_plane, v_plane, options })
    }
    /// Returns the queries.
    pub fn q(&self) -> &TokenTensor<'a, Buf> {
        &self.q
    }
    /// Returns the output rows.
    pub fn out(&mut self) -> &mut TokenTensorMut<'a, Buf> {
        &mut self.out
    }
    /// Returns the log-sum-exp of every query and head, one value per row. For a query that sees
    /// nothing it is the sink logit, or negative infinity without sink logits; for padding,
    /// negative infinity.
    pub fn lse(&mut self) -> Option<&mut TokenTensorMut<'a, Buf>> {
        self.lse.as_mut()
    }
    /// Returns the outputs: the output rows, and the log-sum-exp if it was requested.
    pub fn outputs(&mut self) -> [Option<&mut TokenTensorMut<'a, Buf>>; 2] {
        [Some(&mut self.out), self.lse.as_mut()]
    }
    /// Returns the keys.
    pub fn k_plane(&self) -> &PlaneView<'a, Buf> {
        &self.k_plane
    }
    /// Returns the values.
    pub fn v_plane(&self) -> &PlaneView<'a, Buf> {
        &self.v_plane
    }
    /// Returns the options.
    pub fn options(&self) -> &AttentionOptions<'a> {
        &self.options
    }
    pub(crate) fn into_parts(self) -> AttendParts<'a, Buf> {
        AttendParts {
            q: self.q,
            outputs: (self.out, self.lse),
            planes: [self.k_plane, self.v_plane],
            options: self.options,
        }
    }
    pub(crate) fn from_parts(parts: AttendParts<'a, Buf>) -> Self {
        let AttendParts { q, outputs: (out, lse), planes: [k_plane, v_plane], options } = parts;
        Self { q, out, lse, k_plane, v_plane, options }
    }
}

/// The fields of [`AttendArgs`], for type erasure.
pub(crate) struct AttendParts<'a, Buf> {
    pub(crate) q: TokenTensor<'a, Buf>,
    pub(crate) outputs: (TokenTensorMut<'a, Buf>, Option<TokenTensorMut<'a, Buf>>),
    pub(crate) planes: [PlaneView<'a, Buf>; 2],
    pub(crate) options: AttentionOptions<'a>,
}

fn check_lse<'a, Buf>(
    lse: TensorViewMut<'a, Buf>,
    need: &TokenRequirement,
) -> Result<TokenTensorMut<'a, Buf>, PlanError> {
    let got = lse.dtype();
    if got != DType::F32 {
        return Err(PlanError::ElementType { tensor: "lse", expected: "f32", got });
    }
    TokenTensorMut::check(lse.with_unit_dim(), need)
}

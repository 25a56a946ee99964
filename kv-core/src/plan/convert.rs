//! Conversion of rows between `bshd`, `sbhd` and `thd`, element types, and stored rows.
use kv_format::{DType, KvFormat};

use crate::error::{OptionProblem, PlanError};
use crate::geometry::Axes;
use crate::num::{to_u32, to_u64};
use crate::tensor::{
    Dims, TensorView, TensorViewMut, TokenRequirement, TokenRows, TokenTensor, TokenTensorMut,
};

/// Lengths of a batch of token rows, for conversions between formats and element types.
///
/// Mirrors TransformerEngine's `convert_thd_to_bshd` and `convert_bshd_to_thd`, for all nine pairs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConvertPlan {
    starts: Vec<u32>,
    len_max: u32,
}

impl ConvertPlan {
    /// Creates a batch of entries with the given lengths, in tokens.
    ///
    /// # Errors
    /// [`PlanError::TooMany`] when the total does not fit `u32`.
    pub fn new(lens: &[u32]) -> Result<Self, PlanError> {
        let mut starts = vec![0];
        let mut total = 0_u32;
        for &len in lens {
            total = total.checked_add(len).ok_or(PlanError::TooMany {
                what: "tokens to convert",
                got: u64::from(total) + u64::from(len),
                max: u64::from(u32::MAX),
            })?;
            starts.push(total);
        }
        Ok(Self { starts, len_max: lens.iter().copied().max().unwrap_or(0) })
    }
    /// Creates a batch from its prefix sums, `cu_seqlens[0] == 0`.
    ///
    /// # Errors
    /// [`PlanError::Option`] when the sums are empty, do not start at 0 or fall.
    pub fn from_cu_seqlens(cu_seqlens: &[u32]) -> Result<Self, PlanError> {
        let refuse = |problem| Err(PlanError::Option { option: "cu_seqlens", problem });
        let first = cu_seqlens.first().copied();
        if first != Some(0) {
            return refuse(OptionProblem::NotFromZero { first });
        }
        let pairs = cu_seqlens.iter().zip(cu_seqlens.iter().skip(1));
        let mut lens = Vec::with_capacity(pairs.len());
        for (index, (before, got)) in (1..).zip(pairs) {
            let Some(len) = got.checked_sub(*before) else {
                return refuse(OptionProblem::Falls { index, before: *before, got: *got });
            };
            lens.push(len);
        }
        Self::new(&lens)
    }
    /// Returns whether rows of an element type are encoded to a stored format and decoded from it.
    /// Between tensors all nine pairs of element types convert.
    ///
    /// | element type | stored format | used by |
    /// |---|---|---|
    /// | `f32` | `q8_0` | snapshots of recurrent states |
    pub fn encodes(dtype: DType, format: KvFormat) -> bool {
        matches!((dtype, format), (DType::F32, KvFormat::Q8_0))
    }
    /// Returns the number of entries.
    pub fn batch(&self) -> usize {
        self.starts.len() - 1
    }
    /// Iterates over the first ragged row and the number of tokens of every entry.
    pub fn entries(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        let ends = self.starts.iter().skip(1);
        self.starts.iter().zip(ends).map(|(start, end)| (*start, end - *start))
    }
    /// Returns the tokens of all entries.
    pub fn total(&self) -> u32 {
        self.starts.last().copied().unwrap_or(0)
    }
}

/// Rows in a stored format, one after another without gaps: those of all entries in the order of a
/// ragged tensor, each token with its heads.
#[derive(Debug)]
pub struct StoredRows<'a, Buf> {
    format: KvFormat,
    tokens: u32,
    heads: u32,
    dim: u32,
    buffer: &'a Buf,
    offset: u64,
}

impl<Buf> Clone for StoredRows<'_, Buf> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<Buf> Copy for StoredRows<'_, Buf> {}

impl<'a, Buf> StoredRows<'a, Buf> {
    /// Quantised rows hold scales of two bytes.
    const ALIGN: usize = size_of::<u16>();

    /// Refuses a pair of formats that [`ConvertPlan::encodes`] does not list, and an offset at
    /// which no row begins.
    fn check(
        plan: &ConvertPlan,
        rows: &TokenRows,
        (format, buffer, offset): (KvFormat, &'a Buf, u64),
        tensor: &'static str,
    ) -> Result<Self, PlanError> {
        let (dtype, align) = (rows.dtype(), Self::ALIGN);
        if !ConvertPlan::encodes(dtype, format) {
            return Err(PlanError::Conversion { dtype, format });
        }
        if !offset.is_multiple_of(to_u64(align)) {
            return Err(PlanError::Misaligned { tensor, align });
        }
        let (tokens, heads, dim) = (plan.total(), rows.heads(), rows.dim());
        Ok(Self { format, tokens, heads, dim, buffer, offset })
    }
    /// Returns the encoding of a row.
    pub fn format(&self) -> KvFormat {
        self.format
    }
    /// Returns the tokens of all entries.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }
    /// Returns the rows of a token.
    pub fn heads(&self) -> u32 {
        self.heads
    }
    /// Returns the values of a row.
    pub fn dim(&self) -> u32 {
        self.dim
    }
    /// Returns the bytes of one row.
    pub fn row_bytes(&self) -> u64 {
        self.format.row_bytes(self.dim)
    }
    /// Returns the bytes of all rows; `u64::MAX` if more.
    pub fn bytes(&self) -> u64 {
        let rows = u64::from(self.tokens) * u64::from(self.heads);
        rows.saturating_mul(self.row_bytes())
    }
    /// Returns the buffer that holds the rows.
    pub fn buffer(&self) -> &'a Buf {
        self.buffer
    }
    /// Returns the bytes of the buffer before the first row, an even number.
    pub fn offset(&self) -> u64 {
        self.offset
    }
    /// Converts the buffer handle of the rows.
    pub(crate) fn try_map<T: 'a, E>(
        self,
        cast: impl FnOnce(&'a Buf) -> Result<&'a T, E>,
    ) -> Result<StoredRows<'a, T>, E> {
        let Self { format, tokens, heads, dim, buffer, offset } = self;
        Ok(StoredRows { format, tokens, heads, dim, buffer: cast(buffer)?, offset })
    }
}

/// The source and the target of a conversion.
#[derive(Debug)]
#[expect(clippy::exhaustive_enums, reason = "a backend supports each")]
pub enum ConvertEnds<'a, Buf> {
    /// From tensor to tensor: axes and element type change.
    Tensors(TokenTensor<'a, Buf>, TokenTensorMut<'a, Buf>),
    /// From a tensor to stored rows, encoded as [`kv_format::row::encode_row`] does, to the bit.
    Encode(TokenTensor<'a, Buf>, StoredRows<'a, Buf>),
    /// From stored rows to a tensor, decoded as [`kv_format::row::decode_row`] does, to the bit.
    Decode(StoredRows<'a, Buf>, TokenTensorMut<'a, Buf>),
}

/// Tensors of one conversion, checked against a [`ConvertPlan`].
#[derive(Debug)]
pub struct ConvertArgs<'a, Buf> {
    ends: ConvertEnds<'a, Buf>,
}

/// Returns the requirements of a plan for a tensor.
fn need(
    plan: &ConvertPlan,
    tensor: &'static str,
    axes: Axes,
    (heads, dim): (Option<u32>, u32),
) -> TokenRequirement {
    TokenRequirement {
        tensor,
        axes,
        batch: to_u32(plan.batch()),
        tokens_max: plan.len_max,
        tokens_total: plan.total(),
        heads,
        dim,
    }
}

/// Returns the values of a row of a tensor of any shape.
fn last(dims: Dims) -> u32 {
    dims.as_slice().last().copied().unwrap_or(0)
}

impl<'a, Buf> ConvertArgs<'a, Buf> {
    /// Checks both tensors; padding rows of `src` are not read, those of `dst` become zero.
    ///
    /// # Errors
    /// Those of [`AttendArgs::new`](crate::plan::AttendArgs::new) for its tensors.
    pub fn new(
        plan: &ConvertPlan,
        (src, from): (TensorView<'a, Buf>, Axes),
        (dst, to): (TensorViewMut<'a, Buf>, Axes),
    ) -> Result<Self, PlanError> {
        let dim = last(src.dims());
        let src = TokenTensor::check(src, &need(plan, "src", from, (None, dim)))?;
        let heads = src.rows().heads();
        let dst = TokenTensorMut::check(dst, &need(plan, "dst", to, (Some(heads), dim)))?;
        Ok(Self { ends: ConvertEnds::Tensors(src, dst) })
    }
    /// Checks a tensor that is encoded to the rows from byte `dst.2` of buffer `dst.1` on, in
    /// format `dst.0`.
    ///
    /// # Errors
    /// [`PlanError::Conversion`] for a pair that [`ConvertPlan::encodes`] does not list,
    /// [`PlanError::Misaligned`] for an odd offset, and those of [`Self::new`] for the tensor.
    pub fn encode(
        plan: &ConvertPlan,
        (src, from): (TensorView<'a, Buf>, Axes),
        dst: (KvFormat, &'a Buf, u64),
    ) -> Result<Self, PlanError> {
        let dim = last(src.dims());
        let src = TokenTensor::check(src, &need(plan, "src", from, (None, dim)))?;
        let dst = StoredRows::check(plan, src.rows(), dst, "dst")?;
        Ok(Self { ends: ConvertEnds::Encode(src, dst) })
    }
    /// Checks a tensor to which the rows from byte `src.2` of buffer `src.1` on are decoded, in
    /// format `src.0`. Padding rows of the tensor become zero.
    ///
    /// # Errors
    /// Those of [`Self::encode`].
    pub fn decode(
        plan: &ConvertPlan,
        src: (KvFormat, &'a Buf, u64),
        (dst, to): (TensorViewMut<'a, Buf>, Axes),
    ) -> Result<Self, PlanError> {
        let dim = last(dst.dims());
        let dst = TokenTensorMut::check(dst, &need(plan, "dst", to, (None, dim)))?;
        let src = StoredRows::check(plan, dst.rows(), src, "src")?;
        Ok(Self { ends: ConvertEnds::Decode(src, dst) })
    }
    /// Returns source and target.
    pub fn ends(&mut self) -> &mut ConvertEnds<'a, Buf> {
        &mut self.ends
    }
    /// Returns the outputs that may lie in host memory: only the target, if it is a tensor.
    pub fn outputs(&mut self) -> [Option<&mut TokenTensorMut<'a, Buf>>; 2] {
        match &mut self.ends {
            ConvertEnds::Tensors(_, dst) | ConvertEnds::Decode(_, dst) => [Some(dst), None],
            ConvertEnds::Encode(..) => [None, None],
        }
    }
    pub(crate) fn into_ends(self) -> ConvertEnds<'a, Buf> {
        self.ends
    }
    pub(crate) fn from_ends(ends: ConvertEnds<'a, Buf>) -> Self {
        Self { ends }
    }
}

//! One step of a model.
use std::cell::{Cell, RefCell};
use std::fmt;
use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor, bail};
use kv::backend::{AnyBackend, Backend};
use kv::num::to_usize;
use kv::{AttentionOptions, Step};

use crate::attend::Attend;
use crate::axes::{Form, readable};
use crate::error::Error;
use crate::state::{ReadState, StatePart, WriteState, refused};

/// An open step. Its methods take `&self`, because candle's models pass everything down by
/// reference.
///
/// Dropped without [`Self::commit`], the step is rolled back: no length advances, and no block that
/// it took stays taken. A step that was [lent](Self::over_mut) goes on with its owner.
#[derive(Debug)]
pub struct CandleStep<'c, B: Backend = AnyBackend> {
    step: RefCell<Held<'c, B>>,
    positions: Tensor,
    last_rows: Tensor,
    copies: Cell<u64>,
}

impl<'c, B: Backend> CandleStep<'c, B> {
    /// Takes a step that an engine began itself and has all tokens, for a model on `device`.
    ///
    /// # Errors
    /// [`Error::Candle`] if the device cannot hold the positions. The step is rolled back then.
    pub fn over(step: Step<'c, B>, device: &Device) -> std::result::Result<Self, Error> {
        Self::of(Held::Owned(step), device)
    }

    /// Borrows a step that somebody else ends, an engine for example that calls the model.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use kv_candle::kv::backend::AnyBackend;
    /// use kv_candle::kv::{AttentionOptions, CacheSpec, SequenceId, StartOptions, Step, StepInput};
    /// use kv_candle::{CandleCache, CandleStep};
    ///
    /// fn forward(step: &mut Step<'_>) -> candle_core::Result<Tensor> {
    ///     let step = CandleStep::<AnyBackend>::over_mut(step, &Device::Cpu)?;
    ///     let x = Tensor::zeros((2, 1, 4), DType::F32, &Device::Cpu)?;
    ///     step.attend(0, &x, &x, &x, &AttentionOptions::causal(0.5))
    /// }
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(4).paged(16, 8).build()?;
    /// let mut cache = CandleCache::new(&Device::Cpu, spec)?.into_kv();
    /// cache.start(SequenceId(0), &[1, 2], StartOptions::default())?;
    /// let mut step = cache.begin_step(&[StepInput::tokens(SequenceId(0), &[1, 2])])?;
    /// assert_eq!(forward(&mut step)?.dims(), [2, 4]);
    /// step.commit()?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Candle`] if the device cannot hold the positions. The step stays open then.
    pub fn over_mut(
        step: &'c mut Step<'_, B>,
        device: &Device,
    ) -> std::result::Result<Self, Error> {
        Self::of(Held::Lent(step), device)
    }

    fn of(mut step: Held<'c, B>, device: &Device) -> std::result::Result<Self, Error> {
        let (positions, last_rows) = step.with(|step| rows(step, device))?;
        Ok(Self { step: RefCell::new(step), positions, last_rows, copies: Cell::new(0) })
    }

    /// Returns the position of every token of the step in its sequence, `u32 [t]`, sequences one
    /// after another: `cos.index_select(step.positions(), 0)`.
    pub fn positions(&self) -> &Tensor {
        &self.positions
    }

    /// Returns the row of the last token of every sequence, `u32 [b]`: the rows that need logits.
    pub fn last_rows(&self) -> &Tensor {
        &self.last_rows
    }

    /// Writes the K and V of the step's tokens to one layer, and attends its queries over every
    /// token of their sequences, these included.
    ///
    /// # Shapes
    /// | q | k, v | result |
    /// |---|---|---|
    /// | `[t, heads, dim]` | `[t, kv_heads, dim]` | `[t, heads * dim]` |
    ///
    /// The tokens of all sequences follow each other. `heads` is a multiple of `kv_heads`, and V
    /// may have another `dim` than K; the result has V's. RoPE has been applied to q and k. Rows
    /// beyond those of the step, as of a batch that is padded to a fixed size, are neither written
    /// nor attended; the result is zero there.
    ///
    /// Four dimensions are refused, those of `[1, t, heads, dim]` before `squeeze(0)` too: their
    /// axes are named by the call, [`Self::attend_bhsd`], because `[1, 6, 6, dim]` may be 6 tokens
    /// with 6 heads or 6 heads with 6 tokens.
    ///
    /// Tensors are read in place where the values of all heads of a token lie together, as after a
    /// projection, also if the tensor was transposed. Others are copied first.
    ///
    /// # Errors
    /// candle's error with the words of the cache: tensors that differ in element type or device,
    /// or are none of f32, f16 and bf16; shapes that are not those of the step and the cache
    /// ([`Error::Shape`] for the axes); an unknown layer; options that contradict each other. The
    /// step stays open, and the layer can be attended again: its K and V may be written already.
    pub fn attend(
        &self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        options: &AttentionOptions<'_>,
    ) -> Result<Tensor> {
        self.attend_as(Form::Packed, layer, [q, k, v], options)
    }

    /// Does what [`Self::attend`] does for tensors with heads before tokens, which most of candle's
    /// models have: one entry of the batch for each sequence, with `s` tokens or fewer, padded at
    /// the end.
    ///
    /// # Shapes
    /// | q | k, v | result |
    /// |---|---|---|
    /// | `[b, heads, s, dim]` | `[b, kv_heads, s, dim]` | `[b, s, heads * dim]` |
    ///
    /// Tensors with tokens before heads, `[b, s, heads, dim]`, are refused unless `s` happens to be
    /// `kv_heads`: only the caller knows the axes of such a tensor. [`Self::attend`] has no such
    /// case.
    ///
    /// # Errors
    /// Those of [`Self::attend`].
    pub fn attend_bhsd(
        &self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        options: &AttentionOptions<'_>,
    ) -> Result<Tensor> {
        self.attend_as(Form::Bhsd, layer, [q, k, v], options)
    }

    fn attend_as(
        &self,
        form: Form,
        layer: usize,
        [q, k, v]: [&Tensor; 3],
        options: &AttentionOptions<'_>,
    ) -> Result<Tensor> {
        let Ok(layer) = u16::try_from(layer) else { bail!("a cache has no layer {layer}") };
        for (name, tensor) in [("q", q), ("k", k), ("v", v)] {
            form.check(name, tensor)?;
        }
        let [q, k, v] = [self.readable(q)?, self.readable(k)?, self.readable(v)?];
        let op = Attend { step: &self.step, layer, options: *options };
        q.apply_op3_no_bwd(&k, &v, &op)
    }

    /// Returns the rows of every entry of the step in a tensor of its tokens, in the order of the
    /// inputs; none for an entry without new tokens. A recurrence computes each range by itself.
    pub fn entries(&self) -> Vec<Range<usize>> {
        self.step.borrow_mut().with(|step| {
            let rows = |sequence: &kv::backend::plan::PlannedSequence| {
                let (begin, len) = (to_usize(sequence.q_start), to_usize(sequence.q_len));
                begin..begin.saturating_add(len)
            };
            step.sequences().iter().map(rows).collect()
        })
    }

    /// Reads a part of a layer's recurrent state of every entry, as it was before this step, to new
    /// memory in f32 on the model's device: zeros for a sequence that begins.
    ///
    /// # Shapes
    /// The result is `[entries, ..]` with the extents of the part, entries as in [`Self::entries`].
    ///
    /// # Errors
    /// candle's error with the words of the cache: a layer that is unknown or has no state, and a
    /// part that its state lacks. The step stays open.
    pub fn state(&self, layer: usize, part: usize) -> Result<Tensor> {
        let part = self.state_part(layer, part)?;
        self.positions.apply_op1_no_bwd(&ReadState { step: &self.step, part })
    }

    /// Writes a part of a layer's recurrent state of every entry, behind all of its new tokens.
    /// Entries without new tokens are not read. A write may be repeated.
    ///
    /// # Shapes
    /// `state` is `[b, ..]` as the result of [`Self::state`], in f32, f16 or bf16; entries of `b`
    /// beyond those of the step are not read. A tensor whose values do not lie together is copied
    /// first.
    ///
    /// # Errors
    /// Those of [`Self::state`]; another shape or element type, and a device that the cache has no
    /// backend for. Nothing is written then, and the step stays open.
    pub fn set_state(&self, layer: usize, part: usize, state: &Tensor) -> Result<()> {
        self.write_state(layer, part, None, state)
    }

    /// Writes a part of a layer's recurrent state of the entries behind their first `tokens` new
    /// tokens, for drafts of which [`Self::commit_accepted`] may keep only these. Entries that keep
    /// no state there are not read, see [`Self::keeps_state_after`].
    ///
    /// # Errors
    /// Those of [`Self::set_state`]; no tokens, and more than an entry of the step has.
    pub fn set_state_after(
        &self,
        layer: usize,
        part: usize,
        tokens: usize,
        state: &Tensor,
    ) -> Result<()> {
        // The cache refuses more tokens than an entry has.
        let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        self.write_state(layer, part, Some(tokens), state)
    }

    /// Returns whether the step keeps a layer's state of an entry behind its first `tokens` new
    /// tokens: behind all of them, and in front of each of its drafts.
    ///
    /// # Errors
    /// Those of [`Self::state`], and an entry that the step lacks.
    pub fn keeps_state_after(&self, layer: usize, entry: usize, tokens: usize) -> Result<bool> {
        self.step.borrow_mut().with(|step| {
            let Ok(layer) = u16::try_from(layer) else { bail!("a cache has no layer {layer}") };
            let slots = step.state_slots(layer).map_err(refused)?;
            let entries = step.sequences().len();
            if entry >= entries {
                bail!("a step of {entries} entries has no entry {entry}");
            }
            let tokens = u32::try_from(tokens).ok();
            Ok(tokens.is_some_and(|tokens| slots.write_after(entry, tokens).is_some()))
        })
    }

    fn write_state(
        &self,
        layer: usize,
        part: usize,
        tokens: Option<u32>,
        state: &Tensor,
    ) -> Result<()> {
        let part = self.state_part(layer, part)?;
        self.copies.set(self.copies.get() + u64::from(!state.is_contiguous()));
        WriteState { step: &self.step, part, tokens }.write(&state.contiguous()?)
    }

    fn state_part(&self, layer: usize, part: usize) -> Result<StatePart> {
        self.step.borrow_mut().with(|step| StatePart::of(step, layer, part))
    }

    /// Lends the step, to attention that is not on tensors of candle.
    ///
    /// # Panics
    /// If `using` calls a method of this step.
    pub fn with_step<T>(&self, using: impl FnOnce(&mut Step<'_, B>) -> T) -> T {
        self.step.borrow_mut().with(using)
    }

    /// Returns how many tensors [`Self::attend`] and [`Self::set_state`] had to copy so far,
    /// because of how they lay in memory.
    pub fn copies(&self) -> u64 {
        self.copies.get()
    }

    /// Does what [`readable`] does, and counts copies.
    fn readable(&self, tensor: &Tensor) -> Result<Tensor> {
        let (tensor, is_copy) = readable(tensor)?;
        self.copies.set(self.copies.get() + u64::from(is_copy));
        Ok(tensor)
    }

    /// Ends the step: every length advances by its tokens.
    ///
    /// # Errors
    /// [`Error::Cache`] for a layer that was not written, and if the device failed: the step is
    /// rolled back then. [`Error::Lent`] for a step of [`Self::over_mut`], which goes on.
    pub fn commit(self) -> std::result::Result<(), Error> {
        Ok(self.step.into_inner().owned()?.commit()?)
    }

    /// Ends a step with drafts: keeps the first `accepted` tokens of each sequence.
    ///
    /// # Errors
    /// Those of [`Self::commit`], and of [`Step::commit_accepted`].
    pub fn commit_accepted(self, accepted: &[u32]) -> std::result::Result<(), Error> {
        Ok(self.step.into_inner().owned()?.commit_accepted(accepted)?)
    }
}

/// A step, and who ends it.
pub(crate) enum Held<'c, B: Backend> {
    Owned(Step<'c, B>),
    Lent(&'c mut dyn Lend<B>),
}

/// A step of any lifetime, which a type that borrows it cannot name.
pub(crate) trait Lend<B: Backend>: fmt::Debug {
    fn lend(&mut self, using: &mut dyn FnMut(&mut Step<'_, B>));
}

impl<B: Backend> Lend<B> for Step<'_, B> {
    fn lend(&mut self, using: &mut dyn FnMut(&mut Step<'_, B>)) {
        using(self);
    }
}

impl<'c, B: Backend> Held<'c, B> {
    pub(crate) fn with<T>(&mut self, using: impl FnOnce(&mut Step<'_, B>) -> T) -> T {
        let lent = match self {
            Self::Owned(step) => return using(step),
            Self::Lent(lent) => lent,
        };
        let (mut using, mut used) = (Some(using), None);
        lent.lend(&mut |step| used = using.take().map(|using| using(step)));
        match used {
            Some(used) => used,
            None => unreachable!("a step is lent when it is asked for"),
        }
    }

    /// Returns the step to end it.
    fn owned(self) -> std::result::Result<Step<'c, B>, Error> {
        match self {
            Self::Owned(step) => Ok(step),
            Self::Lent(_) => Err(Error::Lent),
        }
    }
}

impl<B: Backend> fmt::Debug for Held<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Owned(step) => step.fmt(f),
            Self::Lent(step) => step.fmt(f),
        }
    }
}

/// Returns the position of every token, and the row of the last token of every sequence.
fn rows<B: Backend>(step: &Step<'_, B>, device: &Device) -> Result<(Tensor, Tensor)> {
    let positions = Tensor::new(step.positions(), device)?;
    let queried = step.sequences().iter().filter(|sequence| sequence.q_len > 0);
    let last = |sequence: &kv::backend::plan::PlannedSequence| {
        sequence.q_start.saturating_add(sequence.q_len.saturating_sub(1))
    };
    let last_rows: Vec<u32> = queried.map(last).collect();
    Ok((positions, Tensor::from_slice(&last_rows, last_rows.len(), device)?))
}

/// Says that tensors have types that do not go together.
pub(crate) fn types_differ(types: &[(&str, DType)]) -> String {
    let types: Vec<_> = types.iter().map(|(name, dtype)| format!("{name} is {dtype:?}")).collect();
    format!("{}: they must be of one type, f32, f16 or bf16", types.join(", "))
}

//! The cases of a suite: shapes and formats of each operation, and the number of layers of each
//! case.
#[cfg(test)]
mod tests;

use kv::KvFormat;

use super::error::Error;
use super::options::{BlockSize, Formats, Options, Suite};
use super::report::RunsOn;
use super::work::{self, Operation, Shape, Work};
use super::workload;

/// Bytes that one run reads at least, over all its layers: more than CPU caches hold.
const COLD: u64 = 1 << 28;
const LAYERS_MAX: u16 = 256;
/// Tokens of a short prompt.
const SHORT: u32 = 64;

/// One operation at one shape in one format.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Case {
    /// The operation.
    pub operation: Operation,
    /// The stored formats of K and V.
    pub stored: Formats,
    /// The shape.
    pub shape: Shape,
    /// Slots per block, also of a contiguous cache.
    pub block_size: u32,
    /// Bytes and operations of one layer.
    pub work: Work,
    /// Bytes of memory that the case needs.
    pub memory: u64,
}

/// The values of each axis, the centre's first.
#[derive(Debug, Clone)]
struct Axes {
    batch: Vec<u32>,
    context: Vec<u32>,
    formats: Vec<Formats>,
    /// Query heads and kv heads.
    heads: Vec<(u32, u32)>,
    head_dim: Vec<u32>,
    blocks: Vec<BlockSize>,
}

/// One value per axis.
#[derive(Debug, Clone, PartialEq)]
struct Point {
    batch: u32,
    context: u32,
    stored: Formats,
    heads: (u32, u32),
    head_dim: u32,
    block: BlockSize,
}

/// Returns the operations of these suites, each once.
pub(super) fn operations(suites: &[Suite]) -> Vec<Operation> {
    use Operation::{Append, AppendPrompt, Copy, Decode, Gather, Plan, Prefill};
    let of = |suite| match suite {
        Suite::Decode => vec![Decode],
        Suite::Prefill => vec![Prefill],
        Suite::Append => vec![Append, AppendPrompt],
        Suite::Gather => vec![Gather],
        Suite::Copy => vec![Copy],
        Suite::Plan => vec![Plan],
        Suite::All => vec![Decode, Prefill, Append, AppendPrompt, Gather, Copy, Plan],
    };
    distinct(suites.iter().flat_map(|suite| of(*suite)))
}

/// Returns all cases of the suites, including those that are too long or too large for a device.
///
/// # Errors
/// [`Error::Case`] for a case that no cache can hold.
pub fn cases(options: &Options, runs_on: RunsOn) -> Result<Vec<Case>, Error> {
    let mut cases = Vec::new();
    for operation in operations(&options.suites) {
        let axes = Axes::new(options, runs_on, operation);
        let points = if options.full { axes.product() } else { axes.star() };
        for point in points {
            let name = format!("{}, {}", operation.name(), point.stored);
            let case = Case::new(options, runs_on, (operation, point));
            cases.push(case.map_err(|error| error.of_case(name))?);
        }
    }
    Ok(cases)
}

/// Returns the number of floating-point operations above which a case is left out unless its
/// context was given: a few seconds on such a device.
pub(super) fn flops_max(runs_on: RunsOn) -> u64 {
    match runs_on {
        RunsOn::Card => 1 << 50,
        RunsOn::Cpu => 1 << 40,
        RunsOn::Software => 1 << 32,
    }
}

impl Axes {
    fn new(options: &Options, runs_on: RunsOn, operation: Operation) -> Self {
        let is_small = runs_on == RunsOn::Software;
        let or = |given: &[u32], default: &[u32]| {
            if given.is_empty() { default.to_vec() } else { given.to_vec() }
        };
        let batch = match operation {
            // One prompt; a larger batch would be more rows of the same kind.
            Operation::AppendPrompt => vec![1],
            Operation::Plan => or(&options.batch, &[1, 64, 1000]),
            _ => or(&options.batch, if is_small { &[1, 4] } else { &[1, 16, 64] }),
        };
        let contexts: &[u32] = if is_small { &[128] } else { &[512, 4096, 32_768] };
        let mut context = or(&options.context, contexts);
        if operation == Operation::AppendPrompt && options.context.is_empty() {
            context.insert(0, SHORT);
        }
        let more_shapes = operation == Operation::Decode && !is_small;
        let head_dims: &[u32] = if more_shapes { &[64, 72, 80, 128] } else { &[64, 128] };
        let default = [BlockSize::Tokens(16), BlockSize::Tokens(32), BlockSize::Contiguous];
        let given = &options.block_size;
        let axes = Self {
            batch,
            context,
            formats: formats(options, is_small),
            heads: heads(options, more_shapes),
            head_dim: or(&options.head_dim, head_dims),
            blocks: if given.is_empty() { default.to_vec() } else { given.clone() },
        }
        .centred(operation);
        if operation != Operation::Plan {
            return axes;
        }
        // A plan does not depend on the format of rows.
        Self {
            formats: first(&axes.formats),
            heads: first(&axes.heads),
            head_dim: first(&axes.head_dim),
            ..axes
        }
    }

    /// Moves the centre's value to the front of each list; if a list lacks it, its first value
    /// stays.
    fn centred(self, operation: Operation) -> Self {
        let bf16 = Formats::from(KvFormat::Bf16);
        let batch = match operation {
            // Compute-bound: one sequence shows the rate.
            Operation::Prefill => 1,
            Operation::Plan => 1000,
            _ => 16,
        };
        Self {
            batch: centred(self.batch, &batch),
            context: centred(self.context, &4096),
            formats: centred(self.formats, &bf16),
            heads: centred(self.heads, &(Options::Q_HEADS, Options::KV_HEADS)),
            head_dim: centred(self.head_dim, &128),
            blocks: centred(self.blocks, &BlockSize::Tokens(16)),
        }
    }

    /// Returns every combination.
    fn product(&self) -> Vec<Point> {
        let mut points = Vec::new();
        for stored in &self.formats {
            for heads in &self.heads {
                for head_dim in &self.head_dim {
                    for block in &self.blocks {
                        for context in &self.context {
                            points.extend(self.batch.iter().map(|batch| Point {
                                batch: *batch,
                                context: *context,
                                stored: *stored,
                                heads: *heads,
                                head_dim: *head_dim,
                                block: *block,
                            }));
                        }
                    }
                }
            }
        }
        distinct(points)
    }

    /// Returns all of batch by all of context, then one other axis at a time.
    fn star(&self) -> Vec<Point> {
        let cross = Self {
            formats: first(&self.formats),
            heads: first(&self.heads),
            head_dim: first(&self.head_dim),
            blocks: first(&self.blocks),
            ..self.clone()
        };
        let centre =
            Self { batch: first(&self.batch), context: first(&self.context), ..cross.clone() };
        let arms = [
            cross,
            Self { heads: self.heads.clone(), ..centre.clone() },
            Self { head_dim: self.head_dim.clone(), ..centre.clone() },
            Self { blocks: self.blocks.clone(), ..centre.clone() },
            Self { formats: self.formats.clone(), ..centre },
        ];
        distinct(arms.iter().flat_map(Self::product))
    }
}

impl Case {
    fn new(
        options: &Options,
        runs_on: RunsOn,
        (operation, point): (Operation, Point),
    ) -> Result<Self, Error> {
        let Point { batch, context, stored, heads, head_dim, block } = point;
        let mut shape = Shape {
            batch,
            context,
            layers: 1,
            q_heads: heads.0,
            kv_heads: heads.1,
            head_dim,
            block_size: block,
            block_order: options.block_order,
            rounds: work::rounds(options, runs_on),
            is_filled: !matches!(operation, Operation::Prefill | Operation::AppendPrompt),
            spares: if operation == Operation::Copy { batch } else { 0 },
        };
        let spec = work::spec(&shape, stored)?;
        let work = work::work(&shape, &spec, operation);
        let block_size = spec.groups().first().map_or(0, kv::spec::GroupSpec::block_size);
        shape.layers = match (options.layers, operation) {
            // These are not memory-bound.
            (_, Operation::Plan) | (None, Operation::Prefill) => 1,
            (Some(layers), _) => layers,
            (None, _) if runs_on == RunsOn::Software => 1,
            (None, _) => {
                // Cases that share a cache must have the same number of layers.
                let of = match operation {
                    Operation::AppendPrompt => work.written,
                    _ => work::work(&shape, &spec, Operation::Decode).read,
                };
                let layers = u16::try_from(COLD.div_ceil(of.max(1))).unwrap_or(u16::MAX);
                layers.clamp(1, LAYERS_MAX)
            }
        };
        let memory = match operation {
            Operation::Plan => 0,
            _ => workload::bytes(&shape, &work::spec(&shape, stored)?, &[operation]),
        };
        Ok(Self { operation, stored, shape, block_size, work, memory })
    }
}

/// Returns pairs of query heads and kv heads: the given ones, or groups of 1, 4 and 8 query heads,
/// and of 5 and 16 with `more`.
fn heads(options: &Options, more: bool) -> Vec<(u32, u32)> {
    let groups: &[u32] = if more { &[4, 1, 8, 16] } else { &[4, 1, 8] };
    let q_heads =
        if options.q_heads.is_empty() { &[Options::Q_HEADS][..] } else { &options.q_heads };
    let kv_heads = |q: u32| {
        if !options.kv_heads.is_empty() {
            return options.kv_heads.clone();
        }
        let share = |group: &u32| q.is_multiple_of(*group);
        groups.iter().filter(|group| share(group)).filter_map(|n| q.checked_div(*n)).collect()
    };
    let pairs = q_heads.iter().flat_map(|q| kv_heads(*q).into_iter().map(|kv| (*q, kv)));
    // 5 does not divide the default number of query heads.
    let is_default = options.q_heads.is_empty() && options.kv_heads.is_empty();
    distinct(
        pairs.chain((is_default && more).then_some((5 * Options::KV_HEADS, Options::KV_HEADS))),
    )
}

/// Returns the formats of a suite: all of them, or a few if each takes minutes.
fn formats(options: &Options, is_small: bool) -> Vec<Formats> {
    if !options.formats.is_empty() {
        return distinct(options.formats.iter().copied());
    }
    if is_small {
        return work::formats(options);
    }
    KvFormat::all().map(Formats::from).collect()
}

fn first<T: Clone>(values: &[T]) -> Vec<T> {
    values.iter().take(1).cloned().collect()
}

/// Moves `centre` to the front if it is in the list.
fn centred<T: PartialEq>(mut values: Vec<T>, centre: &T) -> Vec<T> {
    if let Some(at) = values.iter().position(|value| value == centre) {
        values.get_mut(..=at).into_iter().for_each(|values| values.rotate_right(1));
    }
    values
}

/// Returns each value once, in the order of first occurrence.
fn distinct<T: PartialEq>(values: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut seen = Vec::new();
    for value in values {
        if !seen.contains(&value) {
            seen.push(value);
        }
    }
    seen
}

/// Groups cases that share a cache; each group lists the indices of its cases.
pub(super) fn groups(cases: &[Case]) -> Vec<Vec<usize>> {
    let mut groups: Vec<(&Case, Vec<usize>)> = Vec::new();
    for (index, case) in cases.iter().enumerate() {
        let fits = |(first, _): &&mut (&Case, Vec<usize>)| {
            let is_plan = |case: &Case| case.operation == Operation::Plan;
            is_plan(first) == is_plan(case)
                && first.shape == case.shape
                && first.stored == case.stored
        };
        match groups.iter_mut().find(fits) {
            Some((_, group)) => group.push(index),
            None => groups.push((case, vec![index])),
        }
    }
    groups.into_iter().map(|(_, group)| group).collect()
}

//! Decode steps: one query of each sequence over every stored format, with all that a step may
//! have.
use kv_core::backend::Plane;
use kv_core::calibration::{Calibration, LayerCalibration, PlaneCalibration};
use kv_core::spec::{KeyMean, Transform};
use kv_core::{
    AttentionOptions, Axes, CacheSpec, KvCache, KvFormat, Scaling, SequenceId, StartOptions,
    StepInput, TensorView, TensorViewMut,
};

use super::attend::{case, entry};
use super::fixture::{Case, Choice, Fixture};
use super::{DTYPES, Random, backends};
use crate::CpuBackend;

/// Rows whose lengths are no powers of two: groups of 32 and a rest, and long ones.
const DIMS: [u32; 5] = [80, 96, 112, 192, 576];
/// Heads of a group: fewer than the rows of a register tile, as many, and more.
const GROUPS: [u32; 6] = [1, 3, 5, 8, 9, 71];

#[test]
fn every_format_is_decoded_with_a_cap_and_sink_logits() {
    let mut random = Random::new(31);
    for (index, format) in KvFormat::all().enumerate() {
        for (i, group) in GROUPS.into_iter().enumerate() {
            let kv_heads = if group > 9 { 1 } else { 2 };
            let case = Case {
                dims: [0, 2].map(|shift| DIMS[(index + i + shift) % DIMS.len()]),
                formats: [format; 2],
                transforms: [i % 3 == 0; 2],
                full_precision_prefix: [0, 3][i % 2],
                kv_heads,
                group,
                block_size: 16,
                dtype: DTYPES[(index + i) % DTYPES.len()],
                ..case(vec![entry(0, 37, 1, 1), entry(1, 3, 1, 1)])
            };
            let sink_logits = random.units((kv_heads * group) as usize);
            let choice =
                Choice { cap: Some(2.0), sink_logits: Some(sink_logits), ..Choice::default() };
            for (name, backend) in backends() {
                Fixture::new(&backend, case.clone()).attend(&name, &backend, &choice);
            }
        }
    }
}

/// A cache of one layer and one sequence whose blocks have means, with a full-precision prefix and
/// a tail.
struct Means {
    cache: KvCache<CpuBackend>,
    heads: u32,
    dim: u32,
}

const ID: SequenceId = SequenceId(0);

impl Means {
    fn new(backend: CpuBackend, format: KvFormat, (heads, dim): (u32, u32)) -> Self {
        let spec = CacheSpec::builder()
            .layers(1)
            .kv_heads(heads)
            .head_dim(dim)
            .format(format)
            .transform(Transform::On)
            .full_precision_prefix(4)
            .tail(true)
            .key_mean(KeyMean::PerBlock)
            .paged(16, 20)
            .build()
            .unwrap();
        let scales = if format.given_scales() == Some(Scaling::Head) { heads as usize } else { 1 };
        let plane = PlaneCalibration { scales: vec![0.01; scales], ..PlaneCalibration::default() };
        let layer = LayerCalibration { k: plane.clone(), v: plane };
        let mut cache = KvCache::builder(backend, spec)
            .calibration(Calibration::new(vec![layer]))
            .build()
            .unwrap();
        cache.start(ID, &[], StartOptions::default()).unwrap();
        Self { cache, heads, dim }
    }

    /// A step of this many tokens, whose K has a mean. The last token attends if there are queries.
    fn step(&mut self, random: &mut Random, tokens: u32, queries: Option<&[f32]>) -> Vec<f32> {
        let dims = [tokens, self.heads, self.dim];
        let len = dims.iter().product::<u32>() as usize;
        let k: Vec<_> = (0..len).map(|i| random.unit() + (i % 7) as f32 * 0.2).collect();
        let v = random.units(len);
        let mut step = self.cache.begin_step(&[StepInput::count(ID, tokens)]).unwrap();
        let [k, v] = [&k, &v].map(|rows| TensorView::host(rows, &dims));
        step.write(0, k, v, Axes::Thd).unwrap();
        let mut out = vec![0.0; queries.map_or(0, <[f32]>::len)];
        if let Some(q) = queries {
            let dims = [1, q.len() as u32 / self.dim, self.dim];
            let (q, to) = (TensorView::host(q, &dims), TensorViewMut::host(&mut out, &dims));
            step.attend(0, q, to, &options()).unwrap();
        }
        step.commit().unwrap();
        out
    }

    /// Rows of K or V as a reader sees them.
    fn rows(&mut self, plane: Plane) -> Vec<f32> {
        let tokens = self.cache.state().seq_len(ID).unwrap();
        let dims = [tokens, self.heads, self.dim];
        let mut rows = vec![0.0_f32; dims.iter().product::<u32>() as usize];
        let out = TensorViewMut::host(&mut rows, &dims);
        self.cache.gather(0, plane, &[(ID, 0, tokens)], out, Axes::Thd).unwrap();
        rows
    }

    /// Checks that outputs are near attention in `f64` over the values that a reader sees.
    fn check(&mut self, name: &str, q: &[f32], out: &[f32]) {
        let dim = self.dim as usize;
        let group = q.len() / dim / self.heads as usize;
        let [k, v] = [Plane::Key, Plane::Value].map(|plane| self.rows(plane));
        let rows = |plane: &'_ [f32], head: usize| -> Vec<Vec<f32>> {
            let rows = plane.chunks(dim).skip(head / group).step_by(self.heads as usize);
            rows.map(<[f32]>::to_vec).collect()
        };
        for (head, (q, out)) in q.chunks(dim).zip(out.chunks(dim)).enumerate() {
            let (keys, values) = (rows(&k, head), rows(&v, head));
            let score = |key: &Vec<f32>| {
                let products = key.iter().zip(q).map(|(a, b)| f64::from(*a) * f64::from(*b));
                (products.sum::<f64>() * 0.3 / 1.5).tanh() * 1.5
            };
            let weights: Vec<_> = keys.iter().map(|key| score(key).exp()).collect();
            let total: f64 = weights.iter().sum();
            for (i, got) in out.iter().enumerate() {
                let column = values.iter().map(|row| f64::from(row[i]));
                let expected = column.zip(&weights).map(|(v, w)| v * w).sum::<f64>() / total;
                let near = (f64::from(*got) - expected).abs() < 4e-5;
                assert!(near, "{name}: {i} of head {head} is {got}, not {expected}");
            }
        }
    }
}

fn options() -> AttentionOptions<'static> {
    AttentionOptions::causal(0.3).with_soft_cap(1.5)
}

/// A full-precision prefix, codes of blocks with and without all of their rows, and a tail.
#[test]
fn blocks_with_means_are_decoded() {
    let mut random = Random::new(32);
    let quantised = KvFormat::all().filter(|format| format.is_quantised());
    for (index, format) in quantised.enumerate() {
        for (name, backend) in backends() {
            let (dim, group) = (DIMS[index % 3], GROUPS[index % GROUPS.len()]);
            let mut means = Means::new(backend, format, (2, dim));
            means.step(&mut random, 53, None);
            for step in 0..2 {
                let q = random.units((2 * group * dim) as usize);
                let out = means.step(&mut random, 1, Some(&q));
                means.check(&format!("{name} {format} {group} {dim} step {step}"), &q, &out);
            }
        }
    }
}

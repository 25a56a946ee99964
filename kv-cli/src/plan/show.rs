//! The text of a plan.
use kv::tier::Bytes;
use kv_runner::LayerGeometry;

use super::{Kind, Part, Pools, Report, StateKind, States};
use crate::output;

impl Kind {
    /// Formats the kind: "24 layers, 8 kv heads of 64, a window of 128".
    fn show(&self) -> String {
        let Self { layers, layer } = self;
        let LayerGeometry { kv_heads, head_dim_k, head_dim_v, window, is_latent } = layer;
        let dims = if head_dim_k == head_dim_v {
            head_dim_k.to_string()
        } else {
            format!("{head_dim_k} and {head_dim_v}")
        };
        let rows = if *is_latent {
            format!("a latent row of {head_dim_k}")
        } else {
            format!("{kv_heads} kv heads of {dims}")
        };
        let window = window.map(|window| format!(", a window of {window}")).unwrap_or_default();
        format!("{layers} layers, {rows}{window}")
    }
}

impl Report {
    pub(super) fn show(&self) -> String {
        let Self { model, kinds, states, context, block_size, .. } = self;
        let heading = [
            "format",
            "bits/value",
            "full-precision prefix",
            "bytes/token",
            "a sequence",
            "tokens",
            "sequences",
        ];
        let of_pools = ["blocks", "slots", "snapshots"].into_iter().filter(|_| states.is_some());
        let mut rows = vec![heading.into_iter().chain(of_pools).map(str::to_owned).collect()];
        rows.extend(self.formats.iter().map(|line| {
            [
                line.format.clone(),
                format!("{:.3}", line.bits_per_value),
                line.full_precision_prefix.to_string(),
                line.bytes_per_token.to_string(),
                Bytes(line.sequence_bytes).to_string(),
                line.tokens.map_or_else(|| "-".to_owned(), |tokens| tokens.to_string()),
                line.sequences.to_string(),
            ]
            .into_iter()
            .chain(pools(&line.pools).into_iter().filter(|_| states.is_some()))
            .collect()
        }));
        let memory = Bytes(self.memory_bytes);
        let kinds: Vec<_> = kinds.iter().map(Kind::show).collect();
        let rows_of = if kinds.is_empty() { "no attention".to_owned() } else { kinds.join("; ") };
        let states = states.as_ref().map(|states| states.show(memory)).unwrap_or_default();
        let notes = self.notes.iter().flat_map(|note| ["note: ", note.as_str(), "\n"]);
        let notes: String = notes.collect();
        format!(
            "{model}: {rows_of}\n{states}{notes}in {memory}, sequences of {context} tokens, \
             blocks of {block_size}:\n{}",
            output::table(&rows)
        )
    }
}

/// Formats the cells of a line's pools; kinds of layers have blocks of their own.
fn pools(pools: &Pools) -> [String; 3] {
    let Pools { blocks, slots, snapshots, .. } = pools;
    let blocks: Vec<_> = blocks.iter().map(u64::to_string).collect();
    let blocks = if blocks.is_empty() { "-".to_owned() } else { blocks.join("+") };
    [blocks, slots.to_string(), snapshots.to_string()]
}

impl States {
    /// Formats the states: "states of 48 layers: window 10240x3 f32, matrix 48x128x128 f32".
    fn show(&self, memory: Bytes) -> String {
        let Self { kinds, bytes, snapshot_bytes, fit } = self;
        let kinds: Vec<_> = kinds.iter().map(StateKind::show).collect();
        format!(
            "states of {}: {bytes} bytes a state, {snapshot_bytes} a snapshot; {memory} hold {fit} \
             states alone\n",
            kinds.join("; "),
        )
    }
}

impl StateKind {
    fn show(&self) -> String {
        let part = |Part { name, shape, dtype }: &Part| {
            let shape: Vec<_> = shape.iter().map(u32::to_string).collect();
            format!("{name} {} {dtype}", shape.join("x"))
        };
        let parts: Vec<_> = self.parts.iter().map(part).collect();
        format!("{} layers, {}", self.layers, parts.join(" and "))
    }
}

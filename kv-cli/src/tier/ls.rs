//! `kv tier ls`.
use kv::tier::{Bytes, Listed, ListedChunk};
use serde::Serialize;

use super::facts::{Facts, Front, read_front};
use super::{for_each, is_of, root_digits, short};
use crate::args::LsArgs;
use crate::output;

pub(super) fn run(args: &LsArgs) -> anyhow::Result<()> {
    let store = args.place.open()?;
    let mut heading = HEADING;
    for_each(&*store, |listed| {
        let line = match listed {
            Listed::Chunk(chunk) if is_of(&chunk, args.root.as_ref()) => {
                match read_front(&*store, &chunk)? {
                    Front::Gone => return Ok(()),
                    front => Line::chunk(&chunk, front),
                }
            }
            Listed::Other { path } if args.root.is_none() => Line::other(path),
            _ => return Ok(()),
        };
        if args.json {
            return output::json(&line);
        }
        output::text(std::mem::take(&mut heading))?;
        output::text(&line.text())
    })
}

/// A chunk, or something else.
#[derive(Debug, Default, Serialize)]
struct Line {
    /// The path of an entry that is no chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    other: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    root: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
    #[serde(flatten)]
    facts: Option<Box<Facts>>,
    /// The reason for which the header cannot be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<String>,
}

impl Line {
    fn other(path: String) -> Self {
        Self { other: Some(path), ..Self::default() }
    }

    fn chunk(chunk: &ListedChunk, front: Front) -> Self {
        let (name, bytes) = (Some(chunk.address.name.to_string()), Some(chunk.bytes));
        let line = Self { name, bytes, ..Self::default() };
        match front {
            Front::Read { root, facts } => Self { root: Some(root), facts: Some(facts), ..line },
            Front::Refused(why) => {
                Self { root: Some(root_digits(chunk)), refused: Some(why), ..line }
            }
            Front::Gone => line,
        }
    }

    fn text(&self) -> String {
        let Self { other, root, name, bytes, facts, refused } = self;
        if let Some(path) = other {
            return format!("other: {path}\n");
        }
        let [root, name] = [root, name].map(|name| short(name.as_deref().unwrap_or_default()));
        let bytes = Bytes(bytes.unwrap_or_default()).to_string();
        let Some(facts) = facts else {
            let why = refused.as_deref().unwrap_or_default();
            return format!("{name:16}  {root:16}  {bytes}, no readable header: {why}\n");
        };
        let Facts { model, tokens, first_block, blocks, .. } = &**facts;
        let (group, formats, age) = (facts.group(), facts.formats(), facts.age());
        // A header may say anything.
        let end = first_block.saturating_add(*blocks);
        let blocks = format!("{first_block}..{end}");
        format!(
            "{name:16}  {root:16}  {:16}  {group:>5}  {formats:12}  {tokens:>6}  {blocks:>11}  \
             {bytes:>10}  {age:>4}\n",
            short(model),
        )
    }
}

const HEADING: &str = concat!(
    "name              root              model             group  format        ",
    "tokens       blocks       bytes   age\n"
);

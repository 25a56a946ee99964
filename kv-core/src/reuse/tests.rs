//! Keys that collide: no hash is made to be broken here, so the index is told equal keys.
use super::*;
use crate::eviction::Priority;
use crate::ids::BlockId;

/// Content under key 9 of parent 1.
fn content<'a>(tokens: &'a [u32], contents: &'a [BlockContent]) -> Content<'a> {
    let (key, parent, namespace) = (BlockKey(9), BlockKey(1), NamespaceId(0));
    Content { key, parent, namespace, index: 0, tokens, contents }
}

fn parts(id: u128) -> Vec<BlockContent> {
    let mut parts = Vec::new();
    BlockContent::cut(&[ContentSpan { begin: 0, len: 1, id }], (0, 2), &mut parts);
    parts
}

#[test]
fn an_equal_key_is_not_an_equal_content() {
    let (cat, dog) = (parts(1), parts(2));
    let own = content(&[5, 6], &cat);
    let mut index = PrefixIndex::new(4, 2);
    assert_eq!(index.insert(BlockId(0), &own, Priority::default()), Inserted::New);
    let others = [
        content(&[5, 7], &cat),
        content(&[5, 6], &dog),
        content(&[5, 6], &[]),
        Content { parent: BlockKey(2), ..own },
        Content { namespace: NamespaceId(1), ..own },
    ];
    for other in &others {
        assert_eq!(index.find(other), None, "{other:?}");
        let inserted = index.insert(BlockId(1), other, Priority::default());
        assert_eq!(inserted, Inserted::Refused, "{other:?}");
        assert!(!index.contains(BlockId(1)) && index.len() == 1);
    }
    assert_eq!(index.find(&own), Some(BlockId(0)));
    assert_eq!(index.insert(BlockId(1), &own, Priority::default()), Inserted::Duplicate);
    assert_eq!(index.insert(BlockId(1), &own, Priority::default()), Inserted::Refused);
}

#[test]
fn the_second_of_two_takes_over_when_the_first_goes() {
    let own = content(&[5, 6], &[]);
    let mut index = PrefixIndex::new(3, 2);
    for block in [2, 0, 1] {
        index.insert(BlockId(block), &own, Priority::default());
    }
    assert_eq!(index.find(&own), Some(BlockId(2)));
    assert_eq!(index.remove(BlockId(0)).unwrap().gone, None);
    assert_eq!(index.remove(BlockId(2)).unwrap().gone, None);
    assert_eq!(index.find(&own), Some(BlockId(1)));
    assert_eq!(index.remove(BlockId(1)).unwrap().gone, Some(BlockKey(9)));
    assert!(index.is_empty() && !index.contains_key(BlockKey(9)));
    assert!(!index.has_children(BlockKey(1)));
}

#[test]
fn a_search_for_a_common_beginning_stays_in_its_namespace() {
    let mut index = PrefixIndex::new(3, 2);
    index.insert(BlockId(0), &content(&[5, 6], &[]), Priority::default());
    index.insert(BlockId(1), &content(&[5, 6], &parts(1)), Priority::default());
    let of = |namespace| index.longest_common(BlockKey(1), NamespaceId(namespace), &[5, 7]);
    assert_eq!((of(0), of(1)), (Some((BlockId(0), 1)), None));
}

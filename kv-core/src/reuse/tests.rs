//! Key collisions: the tests give different contents equal keys.
use super::*;
use crate::eviction::Priority;
use crate::ids::BlockId;

/// Offers full blocks.
fn insert(index: &mut PrefixIndex, block: u32, content: &Content<'_>) -> Offered {
    index.offer(BlockId(block), content, Priority::default(), false)
}

/// Returns content under key 9 of parent 1.
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
    assert_eq!(insert(&mut index, 0, &own), Offered::New);
    let others = [
        content(&[5, 7], &cat),
        content(&[5, 6], &dog),
        content(&[5, 6], &[]),
        Content { parent: BlockKey(2), ..own },
        Content { namespace: NamespaceId(1), ..own },
    ];
    for other in &others {
        assert_eq!(index.find(other), None, "{other:?}");
        let inserted = insert(&mut index, 1, other);
        assert_eq!(inserted, Offered::Refused, "{other:?}");
        assert!(index.get(BlockId(1)).is_none() && index.len() == 1);
    }
    assert_eq!(index.find(&own), Some(BlockId(0)));
    assert_eq!(insert(&mut index, 1, &own), Offered::Known(BlockId(0)));
    assert!(index.get(BlockId(1)).is_none() && index.len() == 1);
    let whole = Content { key: BlockKey(8), ..own };
    assert_eq!(insert(&mut index, 0, &whole), Offered::Refused);
}

#[test]
fn content_is_indexed_once_and_gone_when_its_block_goes() {
    let own = content(&[5, 6], &[]);
    let mut index = PrefixIndex::new(3, 2);
    assert_eq!(insert(&mut index, 2, &own), Offered::New);
    for block in [0, 1, 2] {
        assert_eq!(insert(&mut index, block, &own), Offered::Known(BlockId(2)));
    }
    assert_eq!((index.find(&own), index.len()), (Some(BlockId(2)), 1));
    assert_eq!(index.remove(BlockId(0)), None);
    assert_eq!(index.remove(BlockId(2)).unwrap().gone, Some(BlockKey(9)));
    assert!(index.is_empty());
    assert!(!index.has_children(BlockKey(1)));
}

#[test]
fn a_partial_block_is_indexed_unless_another_continues_it() {
    let child = |tokens: &'static [u32]| Content {
        key: BlockKey(1).child(tokens, &[]),
        ..content(tokens, &[])
    };
    let mut index = PrefixIndex::new(4, 4);
    let mut insert = |block, tokens: &'static [u32]| {
        index.offer(BlockId(block), &child(tokens), Priority::default(), tokens.len() < 4)
    };
    assert_eq!(insert(0, &[5, 6]), Offered::New);
    assert_eq!(insert(1, &[5]), Offered::Known(BlockId(0)));
    assert_eq!(insert(1, &[5, 6]), Offered::Known(BlockId(0)));
    assert_eq!(insert(1, &[5, 7]), Offered::New);
    assert_eq!(insert(2, &[5, 6, 7, 8]), Offered::New);
    assert_eq!(insert(3, &[5, 6, 7]), Offered::Known(BlockId(2)));
    assert_eq!(index.find(&child(&[5, 6])), None, "only full blocks are found by their key");
    assert_eq!(index.find(&child(&[5, 6, 7, 8])), Some(BlockId(2)));
    assert_eq!(index.beginning_of(BlockId(2)), Some(BlockId(0)));
    assert_eq!(index.remove(BlockId(0)).unwrap().gone, None, "no event announced it");
    assert_eq!(index.beginning_of(BlockId(2)), None);
}

#[test]
fn a_search_for_a_common_beginning_stays_in_its_namespace() {
    let mut index = PrefixIndex::new(3, 2);
    for (block, contents) in [(0, Vec::new()), (1, parts(1))] {
        insert(&mut index, block, &content(&[5, 6], &contents));
    }
    let tokens = (&[5, 7][..], &[][..]);
    let of = |namespace| index.longest_beginning(BlockKey(1), NamespaceId(namespace), tokens);
    assert_eq!((of(0), of(1)), (Some((BlockId(0), 1)), None));
}

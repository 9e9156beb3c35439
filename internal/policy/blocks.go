package policy

import (
	"fmt"
	"net/netip"
	"slices"

	"pilaster.io/pilaster/internal/humanize"
)

// maxWithin limits the pairs of a row and a block that applies to it, in one set. A thousand blocks of one prefix, each
// with an exception of its own, make a million pairs.
const maxWithin = 1 << 22

// mappedIPv4 is the prefix of IPv4-mapped IPv6 addresses. An IPv6 block that contains it still matches IPv6 alone.
var mappedIPv4 = netip.MustParsePrefix("::ffff:0:0/96")

// blockRow is a prefix with the matches that apply to its addresses. Addresses in a longer prefix of another row have
// that row's matches instead.
type blockRow struct {
	prefix  netip.Prefix
	within  int // the row of the next shorter prefix that contains this one, or -1
	matches []int
}

// flattenBlocks returns one row, with its matches, for each prefix that is a block or an exception, sorted by prefix.
func flattenBlocks(all []blockMatch) (rows []blockRow, err error) {
	type change struct{ open, shut []int } // by block number
	at, matchOf := map[netip.Prefix]*change{}, []int(nil)
	changes := func(p netip.Prefix) *change {
		p = mappedPrefix(p).Masked()
		if at[p] == nil {
			at[p] = &change{}
			rows = append(rows, blockRow{prefix: p})
		}
		return at[p]
	}
	for i, m := range all {
		for _, b := range m.blocks {
			block := len(matchOf)
			matchOf = append(matchOf, i)
			c := changes(b.Prefix)
			c.open = append(c.open, block)
			except := b.Except
			if b.Prefix.Addr().Is6() && b.Prefix.Bits() <= mappedIPv4.Bits() && b.Prefix.Contains(mappedIPv4.Addr()) {
				except = append(slices.Clip(except), mappedIPv4)
			}
			for _, e := range except {
				c := changes(e)
				c.shut = append(c.shut, block)
			}
		}
	}
	slices.SortFunc(rows, func(a, b blockRow) int { return a.prefix.Compare(b.prefix) })
	open, within := make([][]int, len(rows)), 0
	for i := range rows {
		row := &rows[i]
		// The rows are sorted. So a row that contains this one is the previous row, or contains that row too.
		for row.within = i - 1; row.within >= 0 && !rows[row.within].prefix.Contains(row.prefix.Addr()); {
			row.within = rows[row.within].within
		}
		if row.within >= 0 {
			open[i] = slices.Clone(open[row.within])
		}
		c := at[row.prefix]
		open[i] = append(open[i], c.open...)
		// A binary search, because many blocks may except the same prefix. Their numbers are sorted.
		open[i] = slices.DeleteFunc(open[i], func(block int) bool {
			_, shut := slices.BinarySearch(c.shut, block)
			return shut
		})
		if within += len(open[i]); within > maxWithin {
			return nil, fmt.Errorf(
				"blocks lie within each other more than %s times: put the exceptions of several policies into one",
				humanize.Grouped(maxWithin),
			)
		}
		for _, block := range open[i] {
			row.matches = append(row.matches, matchOf[block])
		}
		slices.Sort(row.matches)
		row.matches = slices.Compact(row.matches)
	}
	return rows, nil
}

package policy

import (
	"fmt"
	"net/netip"
	"slices"

	"pilaster.io/pilaster/internal/humanize"
)

// maxWithin is how often one block of a set may lie in another: a thousand with as many exceptions come to a million.
const maxWithin = 1 << 22

// mappedIPv4 is where IPv4 is in IPv6. A block of IPv6 around it means IPv6 alone.
var mappedIPv4 = netip.MustParsePrefix("::ffff:0:0/96")

// blockRow is a prefix and the matches of its addresses, but for those of a longer prefix.
type blockRow struct {
	prefix  netip.Prefix
	within  int // the row of the next shorter prefix around it, or -1
	matches []int
}

// flattenBlocks is the matches of each prefix, whether a block has it or excepts it, in order.
func flattenBlocks(all []blockMatch) (rows []blockRow, err error) {
	type change struct{ open, shut []int } // blocks by their number
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
		// In this order the row before is around this one, or what is around this one is around that too.
		for row.within = i - 1; row.within >= 0 && !rows[row.within].prefix.Contains(row.prefix.Addr()); {
			row.within = rows[row.within].within
		}
		if row.within >= 0 {
			open[i] = slices.Clone(open[row.within])
		}
		c := at[row.prefix]
		open[i] = append(open[i], c.open...)
		open[i] = slices.DeleteFunc(open[i], func(block int) bool { // many may except the same; they are in order
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

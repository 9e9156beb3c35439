package rules

import (
	"fmt"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/netns"
)

// readRouting names the routing rules (ip rule) that compare bits of the cache in marks.
func readRouting(marks uint32) (unsafe []string, err error) {
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		all, err := netns.List(func() ([]netlink.Rule, error) { return netlink.RuleList(family) })
		if err != nil {
			return nil, err
		}
		for _, r := range all {
			mask := ^uint32(0)
			if r.Mask != nil {
				mask = *r.Mask
			} else if r.Mark == 0 {
				continue
			}
			if mask&marks != 0 {
				name := fmt.Sprintf("routing rule with priority %d (fwmark %#x)", r.Priority, r.Mark)
				unsafe = append(unsafe, name+": "+whyMark(marks))
			}
		}
	}
	return unsafe, nil
}

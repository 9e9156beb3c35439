package orchestrator

import (
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"testing"
	"time"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/orchestrator/cache"
	"pilaster.io/pilaster/internal/orchestrator/nodeprobe"
)

// A node is dead if it has had no session for a while and does not answer, but not if most nodes are like that. The
// witnesses stay the same ones, and are on other machines.
func TestSilentNodes(t *testing.T) {
	node := func(i int) *pilasterv1.Node {
		return &pilasterv1.Node{Name: fmt.Sprint("n", i), Prefix: fmt.Sprintf("fd70:696c:6100:%x::/64", i)}
	}
	answers := map[string]bool{}
	n := &silentNodes{log: slog.New(slog.DiscardHandler), since: map[string]time.Time{}, witnesses: map[string]bool{}}
	n.usable = func(a netip.Addr) (usable, known bool) { usable, known = answers[a.String()]; return usable, known }
	connected := func(order int) (all []*pilasterv1.Node) {
		for i := range 20 {
			all = append(all, node(100+i))
		}
		if order < 0 {
			slices.Reverse(all)
		}
		return all
	}
	own := map[netip.Addr]bool{nodeprobe.Address(node(100)): true}
	now := time.Now()
	judge := func(after time.Duration, r cache.Reachability, probed int, dead ...string) {
		t.Helper()
		now = now.Add(after)
		addrs, is := n.judge(now, r, own)
		if slices.Sort(is); !slices.Equal(is, dead) || len(addrs) != probed || addrs[nodeprobe.Address(node(100))] {
			t.Errorf("dead: %v, probed %v; want %v, %d", is, addrs, dead, probed)
		}
	}
	two := cache.Reachability{Nodes: 4, Suspects: []*pilasterv1.Node{node(1), node(2)}, Connected: connected(1)}
	answers[nodeprobe.Address(node(1)).String()], answers[nodeprobe.Address(node(2)).String()] = false, true
	judge(0, two, 7)
	first := n.witnesses
	judge(silentAfter-1, two, 7)
	two.Connected = connected(-1)
	judge(1, two, 7, "n1")
	if fmt.Sprint(n.witnesses) != fmt.Sprint(first) {
		t.Errorf("witnesses %v, before %v", n.witnesses, first)
	}
	answers[nodeprobe.Address(node(2)).String()] = false
	judge(time.Second, two, 7, "n1", "n2")
	two.Marked = []string{"n3"}
	judge(time.Second, two, 7) // three of four
	two.Nodes = 6
	judge(time.Second, two, 7, "n1", "n2")
	judge(time.Second, cache.Reachability{Nodes: 6, Marked: two.Marked}, 0)
	judge(time.Minute, two, 7) // n1 and n2 have had sessions meanwhile
}

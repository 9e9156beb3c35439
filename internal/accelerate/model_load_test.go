package accelerate_test

import (
	"fmt"
	"io"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"pilaster.io/pilaster/internal/netns"
)

// use counts the cacheable datagrams of a flow and way: those that have arrived, and those of them that the receiver's
// node has not taken from the cache, because they passed its routing to the container.
type use struct{ arrived, passed uint64 }

// uses are those of each flow.
type uses map[*dualFlow][ways]use

// countPassing makes the receivers' nodes count. Rules that only count do not keep the cache from being used.
func (m *model) countPassing(t *testing.T) {
	t.Helper()
	for _, f := range m.flows {
		for way := range ways {
			from, to := f.sender(way), f.receiver(way)
			ip(t, to.node.ns, "! iptables-nft -w -t mangle -A POSTROUTING -p udp -d %v --sport %d --dport %d", to.addr,
				f.port(from, cached), f.port(to, cached))
		}
	}
}

// uses reads what has been counted since the model's start.
func (m *model) uses(t *testing.T) uses {
	t.Helper()
	all := uses{}
	for _, f := range m.flows { // first, so that rather too many have passed than too few
		var u [ways]use
		for way := range ways {
			u[way].arrived = f.arrived[cached][way].total.Load()
		}
		all[f] = u
	}
	for _, n := range m.nodes {
		listed, err := output(n.ns, exec.Command("iptables-nft", "-w", "-t", "mangle", "-nvxL", "POSTROUTING"))
		must(t, err)
		for f, u := range all {
			for way := range ways {
				ports := fmt.Sprintf("spt:%d dpt:%d", f.port(f.sender(way), cached), f.port(f.receiver(way), cached))
				for line := range strings.Lines(listed) {
					if f.receiver(way).node == n && strings.Contains(line, ports) {
						u[way].passed, err = strconv.ParseUint(strings.Fields(line)[0], 10, 64)
						must(t, err)
					}
				}
			}
			all[f] = u
		}
	}
	return all
}

// arrivedSince returns how many datagrams of each flow and way have arrived at least.
func (m *model) arrivedSince(before uses) (least uint64) {
	least = ^uint64(0)
	for f, u := range before {
		for way := range ways {
			least = min(least, f.arrived[cached][way].total.Load()-u[way].arrived)
		}
	}
	return least
}

// since returns what has been counted after an earlier reading.
func (now uses) since(before uses) uses {
	all := uses{}
	for f, u := range now {
		for way := range ways {
			u[way].arrived -= before[f][way].arrived
			u[way].passed -= before[f][way].passed
		}
		all[f] = u
	}
	return all
}

// add adds what has been counted of flows of which all datagrams arrive: of others, some pass and do not arrive.
func (u uses) add(more uses, all func(f *dualFlow) bool) {
	for f, m := range more {
		sum := u[f]
		for way := range ways {
			if all(f) {
				sum[way].arrived += m[way].arrived
				sum[way].passed += m[way].passed
			}
		}
		u[f] = sum
	}
}

// misses returns the flows and ways of which less than half of the datagrams have come from the receiver's cache.
// Changes, and what they evict, make the others miss.
func (u uses) misses(t *testing.T) (all []string) {
	t.Helper()
	for f, of := range u {
		for way, n := range of {
			says := fmt.Sprintf("%v %s: %d datagrams arrived, %d of them not by the cache", f, wayNames[way], n.arrived,
				n.passed)
			t.Log(says)
			if n.arrived == 0 || 2*n.passed > n.arrived {
				all = append(all, says)
			}
		}
	}
	return all
}

// load uses the caches while the model runs: a stream, and containers that start and end.
func (m *model) load(t *testing.T) {
	c := talk(t, m.nodes[0].only(), m.nodes[1].only())
	stop := make(chan struct{})
	var done sync.WaitGroup
	done.Go(func() { _, _ = io.Copy(io.Discard, c.server) }) // a change may interrupt it
	done.Go(func() {
		b := make([]byte, 256<<10)
		for !isClosed(stop) {
			_ = c.client.SetWriteDeadline(time.Now().Add(time.Second))
			_, _ = c.client.Write(b)
			time.Sleep(10 * time.Millisecond)
		}
	})
	failed := make(chan error, 2)
	for _, n := range m.nodes {
		done.Go(func() { failed <- n.churn(stop) })
	}
	t.Cleanup(func() {
		close(stop)
		c.client.Close()
		c.server.Close()
		done.Wait()
		for range m.nodes {
			if err := <-failed; err != nil {
				t.Errorf("containers beside the model: %v", err)
			}
		}
	})
}

// churn starts containers, which end a second later, until stop is closed.
func (n *node) churn(stop chan struct{}) error {
	type running struct {
		device string
		ns     *netns.Namespace
	}
	var all []running
	end := func(most int) (err error) {
		for len(all) > most && err == nil {
			err = n.stop(all[0].device, all[0].ns)
			all = all[1:]
		}
		return err
	}
	for i := 0; !isClosed(stop); i++ {
		device := fmt.Sprintf("%sx%d", n.device, i)
		ns, err := n.start(device, 10+i%40)
		if err != nil {
			return err
		}
		all = append(all, running{device, ns})
		if err := end(4); err != nil {
			return err
		}
		time.Sleep(200 * time.Millisecond)
	}
	return end(0)
}

package rpc

import (
	"fmt"
	"strings"
	"testing"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/offload"
	"pilaster.io/pilaster/internal/orchestrator/cache"
	"pilaster.io/pilaster/internal/orchestrator/store"
)

// TestEstimate: the estimate counts the CIDRs of a tenant's policies, and names what it does not count.
func TestEstimate(t *testing.T) {
	s := &OperatorService{Cache: cache.New("o1", func(string) {})}
	document := func(cidrs int) string {
		blocks := make([]string, cidrs)
		for i := range blocks {
			blocks[i] = fmt.Sprintf(`{"ipBlock": {"cidr": "10.%d.%d.0/24"}}`, i/250, i%250)
		}
		return `{"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "p"},
			"spec": {"podSelector": {}, "ingress": [{"from": [` + strings.Join(blocks, ", ") + `]}]}}`
	}
	policy := func(name string, cidrs int) store.Event {
		return store.Event{Policy: &pilasterv1.Policy{
			Tenant: "green", Kind: "NetworkPolicy", Name: name, Document: document(cidrs),
		}}
	}
	s.Cache.Apply(store.Batch{Whole: true, Revision: 1, Events: []store.Event{policy("a", 700), policy("b", 300)}})
	gain, text := s.estimate(&pilasterv1.Tenant{Name: "green"}, "n1", 4)
	if want := offload.Modelled(1000).Gain(4); gain != want || !strings.Contains(text, "1,000 CIDRs") ||
		strings.Contains(text, "the tenant has") {
		t.Errorf("got gain %v, %s; want that of 1,000 CIDRs, %v", gain, text, want)
	}
	serving := &pilasterv1.Tenant{Name: "green", UnderlayServices: []*pilasterv1.UnderlayService{{}}}
	_, text = s.estimate(serving, "n1", 4)
	const want = "containers of n1, and by the gateway, where the tenant has 1 underlay service or publication"
	if !strings.HasSuffix(text, want) {
		t.Errorf("got %q, want suffix %q", text, want)
	}
}

// TestLoss: only a gain below 1 is refused, unless the operator forces it.
func TestLoss(t *testing.T) {
	for _, c := range []struct {
		gain    float64
		forced  bool
		refused bool
	}{{0.99, false, true}, {0.99, true, false}, {1, false, false}, {2, false, false}} {
		if got := loss(c.gain, "why", c.forced); (got != "") != c.refused {
			t.Errorf("gain %v, forced %v: %q", c.gain, c.forced, got)
		}
	}
}

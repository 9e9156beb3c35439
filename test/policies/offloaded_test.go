package policies_test

import (
	"path/filepath"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/cilium/ebpf"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/datapath/bpfobj"
	"pilaster.io/pilaster/internal/dpapi"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
)

// frontends look up the rules for the containers of all nodes with pods.
var frontends = []string{"n3", "n4"}

// legs is how often an offloaded packet passes from one node to another: to the frontend, to the backend; or with a
// question and its answer.
const legs = 2

// offload makes the nodes with pods backends, so that none of them has rules.
func offload(t *testing.T, l *lab.Lab) {
	t.Helper()
	ctx := labtest.Context(t)
	apply(ctx, t, l, 1000, nil, nil) // a tenant without policies has nothing to offload
	for _, node := range nodes {
		_, err := l.Operator().StartOffload(ctx, connect.NewRequest(&pilasterv1.StartOffloadRequest{
			Tenant: "blue", Node: node, Frontends: frontends, Force: true,
		}))
		if err != nil {
			t.Fatal(err)
		}
	}
	labtest.Until(t, 30*time.Second, "all pods are offloaded", func() bool {
		list, err := l.Operator().ListOffloads(ctx, connect.NewRequest(&pilasterv1.ListOffloadsRequest{}))
		if err != nil {
			t.Fatal(err)
		}
		active := 0
		for _, o := range list.Msg.Offloads {
			if o.Offload.Phase == pilasterv1.OffloadPhase_OFFLOAD_PHASE_ACTIVE {
				active++
			}
		}
		return active == len(nodes)
	})
}

// judged returns for how many packets the frontends have looked up rules: packets that they sent on with pre-actions,
// and questions that they answered.
func judged(t *testing.T, l *lab.Lab) (sum uint64) {
	t.Helper()
	for _, node := range frontends {
		pins, err := filepath.Glob(filepath.Join(l.BPF(node), "maps", bpfobj.PinNimSent+"*")) // with its capacity
		if err != nil || len(pins) != 1 {
			t.Fatalf("%v, %v: want one table of sent messages", pins, err)
		}
		m, err := ebpf.LoadPinnedMap(pins[0], nil)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		var id uint32
		var each []dpapi.Messages // by CPU
		all := m.Iterate()
		for all.Next(&id, &each) {
			for _, sent := range each {
				sum += sent[dpapi.MessagePre] + sent[dpapi.MessageAnswer]
			}
		}
		if err := all.Err(); err != nil {
			t.Fatal(err)
		}
	}
	return sum
}

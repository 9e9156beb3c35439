package offload_test

import (
	"context"
	"slices"
	"testing"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// TestLoad (NZ5): while offloads are automatic, nodes measure and report their packet load: a frontend that of the
// offload, a backend that of its own tenant.
func TestLoad(t *testing.T) {
	b := newBed(t, 20)
	_, err := b.Operator().SetOffloadAuto(b.ctx, connect.NewRequest(&pilasterv1.SetOffloadAutoRequest{On: true}))
	must(t, err)
	b.startWith("n3", "n4")
	ctx, cancel := context.WithCancel(b.ctx)
	s := b.stream(ctx, far, hot, 1000)
	load := func(node string) *pilasterv1.NodeLoad {
		t.Helper()
		resp, err := b.Agent(node).Status(b.ctx, connect.NewRequest(&pilasterv1.StatusRequest{}))
		must(t, err)
		return resp.Msg.Load
	}
	b.until("a frontend has load by the offload", func() bool {
		return slices.ContainsFunc(load("n3").GetFronting(), func(f *pilasterv1.FrontingLoad) bool {
			return f.Tenant == "green" && f.Backend == "n1" && f.Load > 0
		})
	})
	b.until("the backend has load by its containers", func() bool {
		of := load("n1")
		return of.GetOwn() > 0 && of.Own < 1 && of.Budget > 0 && of.RulesCapacity > 0 && of.Sessions > 0 &&
			slices.ContainsFunc(of.Tenants, func(t *pilasterv1.TenantLoad) bool {
				return t.Tenant == "green" && t.Rules > 0
			})
	})
	cancel()
	b.finish(s)
	for _, node := range []string{"n1", "n3", "n4", "n6"} {
		t.Logf("node %s: %v", node, load(node))
	}
}

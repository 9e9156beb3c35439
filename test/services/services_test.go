package services_test

import (
	"fmt"
	"io"
	"net"
	"slices"
	"testing"
	"time"

	"connectrpc.com/connect"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
)

// TestServices: a service reaches the containers that its selector selects, on all nodes, for sockets of the node's
// cgroup and for others, and follows what is added, removed and drained.
func TestServices(t *testing.T) {
	b := newBed(t)
	b.create(&pilasterv1.Service{Name: "web"})
	b.settles("c1", web...)
	all := b.process("c1")
	total := 0
	for _, name := range web {
		line := fmt.Sprint(b.to, " ", name)
		if all[line] == 0 {
			t.Errorf("a process of the node never reached %s: %v", name, all)
		}
		total += all[line]
	}
	if total != 30 {
		t.Errorf("%d of 30 connections of a process: %v", total, all)
	}
	b.settles("w1", web...) // also itself

	kept := map[string]net.Conn{}
	for len(kept) < len(web) {
		name, c, err := b.reach("c1")
		must(t, err)
		if kept[name] != nil {
			c.Close()
			continue
		}
		kept[name] = c
		t.Cleanup(func() { c.Close() })
	}
	must(t, b.RemoveContainer(labtest.Context(t), "w3"))
	b.settles("c1", "w1", "w2")
	b.serveNew("w4", "n3")
	b.settles("c1", "w1", "w2", "w4")
	for _, name := range []string{"w1", "w2"} {
		if err := echo(kept[name]); err != nil {
			t.Errorf("the connection to %s ended when other endpoints changed: %v", name, err)
		}
	}
	_, err := b.Operator().DeleteService(t.Context(), connect.NewRequest(&pilasterv1.DeleteServiceRequest{
		Tenant: shop, Name: "web",
	}))
	must(t, err)
	labtest.Until(t, patience, "connections to a deleted service are refused", func() bool {
		_, _, err := b.reach("c1")
		return err != nil
	})
}

// serveNew adds a web server.
func (b *bed) serveNew(name, node string) {
	b.Helper()
	must(b.T, b.AddContainer(labtest.Context(b.T), lab.Container{
		Name: name, Node: node, Tenant: shop, Labels: map[string]string{"app": "web"},
	}))
	b.serve(name)
}

func echo(c net.Conn) error {
	c.SetDeadline(time.Now().Add(patience))
	if _, err := c.Write([]byte("still")); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, len("still")))
	return err
}

// TestServicesWithoutDaemons: services go on while the agent is dead and while the orchestrator is away; a new agent
// disturbs nothing.
func TestServicesWithoutDaemons(t *testing.T) {
	b := newBed(t)
	b.create(&pilasterv1.Service{Name: "web"})
	b.settles("c1", web...)
	_, c, err := b.reach("c1")
	must(t, err)
	defer c.Close()
	ctx := labtest.Context(t)
	check := func(when string) {
		t.Helper()
		if err := echo(c); err != nil {
			t.Errorf("%s: the open connection: %v", when, err)
		}
		seen := b.seen("c1")
		if len(seen) != len(web) || slices.ContainsFunc(web, func(name string) bool { return seen[name] == 0 }) {
			t.Errorf("%s: connections by backend %v", when, seen)
		}
		if all := b.process("c1"); all[fmt.Sprint(b.to, " w1")] == 0 || len(all) != len(web) {
			t.Errorf("%s: connections of a process %v", when, all)
		}
	}
	must(t, b.KillNoRestart(ctx, lab.AgentProcess("n1")))
	check("without the agent")
	must(t, b.KillNoRestart(ctx, lab.Orchestrator))
	must(t, b.Start(ctx, lab.AgentProcess("n1")))
	check("with a new agent, without the orchestrator")
	must(t, b.Start(ctx, lab.Orchestrator))
	b.settles("c1", web...)
	check("with both again")
	must(t, b.RemoveContainer(ctx, "w2"))
	b.settles("c1", "w1", "w3")
}

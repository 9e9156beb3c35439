package ops_test

import (
	"context"
	"errors"
	"slices"
	"testing"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/packet"
)

// TestInterfacesAreFollowed: the agent guards a new interface immediately, and the interface stays guarded when the
// agent stops. When the agent starts again, it handles the changes of the meantime.
func TestInterfacesAreFollowed(t *testing.T) {
	n := newNode(t, false)
	ctx := labtest.Context(t)
	b1, err := n.Container("b1")
	must(t, err)
	awaitGuarded(ctx, t, n, "eth1", "eth2") // they existed before the agent started
	say(ctx, t, n.ns, "ip link add nic0 type veth peer name nic1")
	awaitGuarded(ctx, t, n, "eth1", "eth2", "nic0", "nic1")
	say(ctx, t, n.ns, "ip link add br0 type bridge")
	say(ctx, t, n.ns, "ip link set nic1 master br0")
	awaitGuarded(ctx, t, n, "br0", "eth1", "eth2", "nic0")

	must(t, n.Stop(ctx, lab.AgentProcess(name)))
	say(ctx, t, n.ns, "ip link set nic0 up")
	raw, err := packet.NewInjector(n.ns, "nic0")
	must(t, err)
	defer raw.Close()
	forged := packet.Packet{Source: b1.Plaintext, Destination: b1.Plaintext,
		Body: packet.UDP{SourcePort: 1, DestinationPort: 9}}.Frame(raw.MAC(), raw.MAC())
	if err := raw.Send(forged); !errors.Is(err, unix.ENOBUFS) {
		t.Errorf("a process could send with a container's source while no agent ran: %v", err)
	}
	say(ctx, t, n.ns, "ip link del nic0")
	must(t, n.Start(ctx, lab.AgentProcess(name)))
	awaitGuarded(ctx, t, n, "br0", "eth1", "eth2")
	drops, err := n.Drops(ctx, name)
	must(t, err)
	if got := drops["host-claims-tenant"]; got != 1 {
		t.Errorf("got %d drops for host-claims-tenant, want 1", got)
	}
}

// awaitGuarded waits until the agent reports exactly these interfaces as guarded.
func awaitGuarded(ctx context.Context, t *testing.T, n *node, devices ...string) {
	t.Helper()
	for {
		resp, err := n.Agent(name).Status(ctx, connect.NewRequest(&pilasterv1.StatusRequest{}))
		must(t, err)
		got := slices.Sorted(slices.Values(resp.Msg.GetDatapath().GetGuarded()))
		if slices.Equal(got, devices) {
			return
		}
		if ctx.Err() != nil {
			t.Fatalf("got guarded interfaces %q, want %q", got, devices)
		}
		pause(ctx, t)
	}
}

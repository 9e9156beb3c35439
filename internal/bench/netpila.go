package bench

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"path/filepath"

	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/address"
	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/endpoint"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/tenant"
)

// addNetpila puts a container behind the node as an agent does, by the same driver. The agent itself
// is on no packet's path and would only share the measured CPU.
func (n *node) addNetpila() (_ *netns.Namespace, a netip.Addr, err error) {
	blue := tenant.Tenant{Name: "blue", Addressing: tenant.Encrypted, IDs: []tenant.ID{{ID: 1, Key: address.Key{'b', 'l', 'u', 'e'}}}}
	plan := address.DefaultPlan()
	plain, a, err := address.NewCipher(blue.Current().Key).Draw(plan.Private, address.Plain{Node: n.prefix, Tenant: 1, App: 1})
	if err != nil {
		return nil, a, err
	}
	c, err := n.wire.namespace(n.name + "-container")
	if err != nil {
		return nil, a, err
	}
	d, err := n.openDatapath(plan)
	if err != nil {
		return nil, a, err
	}
	record := endpoint.Record{
		ID: 1, Interface: "eth0", Netns: c.Path(), Tenant: blue.Name, TenantID: plain.Tenant, App: plain.App,
		Attachments: []endpoint.Attachment{{
			Network: "netpila", Plaintext: plain.Addr(), Address: a,
			Gateway: netip.MustParseAddr("fe80::1"), Routes: []netip.Prefix{plan.Private},
		}},
	}
	if err := d.PutTenant(blue); err != nil {
		return nil, a, err
	}
	if record.Device, err = d.CreateDevice(context.Background(), record); err != nil {
		return nil, a, err
	}
	return c, a, d.Activate(record)
}

func (n *node) openDatapath(plan address.Plan) (d *datapath.Datapath, err error) {
	pins := filepath.Join(n.wire.dir, n.name+"-bpf")
	err = n.ns.Do(func() error {
		d, err = datapath.Open(datapath.Config{
			Uplink: "eth0", NodePrefix: n.prefix, Plan: plan, BPFFS: pins, MaxEndpoints: 16,
			Log: slog.New(slog.DiscardHandler),
		})
		return err
	})
	n.wire.closing(func() error { return unmount(pins) })
	if err != nil {
		return nil, err
	}
	n.wire.closing(d.Close)
	_, err = d.Restore(context.Background(), nil)
	return d, err
}

// unmount takes away a bpffs and with it the last hold on what is pinned there.
func unmount(path string) error {
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		return err
	}
	return nil
}

package scenario

import (
	"errors"
	"net"
	"time"

	"github.com/vishvananda/netlink"

	"pilaster.io/pilaster/internal/datapath"
	"pilaster.io/pilaster/internal/netns"
	"pilaster.io/pilaster/internal/oncache"
)

// cachedVXLAN is vxlan with a cache of ONCache's design, in our own programs.
func cachedVXLAN(w *Wire) (Pair, error) {
	p, err := tunedVXLAN(w)
	if err != nil {
		return p, err
	}
	return w.cached(p)
}

// cachedWithoutRoom is cachedVXLAN without makeRoom.
func cachedWithoutRoom(w *Wire) (Pair, error) {
	p, err := w.withoutChecksums()
	if err != nil {
		return p, err
	}
	return w.cached(p)
}

// tunedVXLAN is vxlan with the details that cachedVXLAN has beside its programs. A comparison with vxlan shows what
// these details are worth without a cache.
func tunedVXLAN(w *Wire) (Pair, error) {
	p, err := w.withoutChecksums()
	for _, n := range w.Nodes {
		if err == nil {
			err = n.makeRoom()
		}
	}
	return p, err
}

// withoutChecksums is vxlan whose tunnel sends outer UDP headers without a checksum. The cache requires this, and it is
// also cheaper for VXLAN.
func (w *Wire) withoutChecksums() (Pair, error) {
	return w.overlay(netlink.Vxlan{UDP6ZeroCSumTx: true, UDP6ZeroCSumRx: true})
}

// cached adds a cache to both nodes of a VXLAN overlay.
func (w *Wire) cached(p Pair) (Pair, error) {
	var caches []*oncache.Cache
	for _, n := range w.Nodes {
		c, err := n.cache()
		if c != nil {
			caches = append(caches, c)
			w.OnClose(keepRenewed(c))
		}
		if err != nil {
			return p, err
		}
	}
	p.Fresh = func() (err error) {
		for _, c := range caches {
			_, failed := c.Evict(oncache.Selector{All: true})
			err = errors.Join(err, failed)
		}
		return err
	}
	p.Runs = func() (datapath.ProgStats, error) { return sumProgramStats(caches) }
	return p, nil
}

// cache opens the cache of a node and adds its container.
func (n *Node) cache() (c *oncache.Cache, err error) {
	err = n.NS.Do(func() error {
		tracks, err := oncache.Tracking()
		if err != nil {
			return err
		}
		c, err = oncache.Open(oncache.Config{
			Uplink: "eth0", Device: "vxlan", Address: n.Underlay, VNI: vxlanID, Port: vxlanPort, Tracks: tracks,
		})
		if err != nil {
			return err
		}
		veth, err := net.InterfaceByName(paired(1))
		if err != nil {
			return err
		}
		return errors.Join(c.Renew(), c.Join(veth.Name, veth.Index))
	})
	return c, err
}

// keepRenewed renews the lease of a cache until the returned function closes it.
func keepRenewed(c *oncache.Cache) func() error {
	stop, result := make(chan struct{}), make(chan error)
	go func() {
		renew := time.NewTicker(time.Second)
		defer renew.Stop()
		var err error
		for {
			select {
			case <-renew.C:
				err = errors.Join(err, c.Renew())
			case <-stop:
				result <- err
				return
			}
		}
	}()
	return func() error {
		close(stop)
		return errors.Join(<-result, c.Close())
	}
}

// makeRoom makes containers reserve headroom for the tunnel's headers. Without headroom the kernel copies every
// datagram. A bridge requests the largest headroom of its ports, so one unused port with this headroom is enough.
// Flannel has no such port; Open vSwitch requests the headroom itself.
func (n *Node) makeRoom() error {
	return OnDevice(n.NS, "eth0", func(h *netlink.Handle, uplink netlink.Link) error {
		bridge, err := h.LinkByName("bridge")
		if err != nil {
			return err
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MasterIndex = "room", bridge.Attrs().Index
		device := &netlink.Vxlan{
			LinkAttrs: attrs, VxlanId: vxlanID + 1, VtepDevIndex: uplink.Attrs().Index, SrcAddr: n.Underlay.AsSlice(),
			Port: vxlanPort + 1,
		}
		return netns.Retry(func() error { return h.LinkAdd(device) })
	})
}

// sumProgramStats adds the statistics of the programs of all nodes.
func sumProgramStats[N interface {
	ProgramStats() (datapath.ProgStats, error)
}](nodes []N) (datapath.ProgStats, error) {
	sum := datapath.ProgStats{}
	for _, n := range nodes {
		runs, err := n.ProgramStats()
		if err != nil {
			return nil, err
		}
		sum.Add(runs)
	}
	return sum, nil
}

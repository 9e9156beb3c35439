package accelerate

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"pilaster.io/pilaster/internal/netns"
)

// Attributes of conntrack entries (linux/netfilter/nfnetlink_conntrack.h).
const (
	ctaTupleOrig     = 1
	ctaProtoInfo     = 4
	ctaZone          = 18
	ctaTCP           = 1 // CTA_PROTOINFO_TCP
	ctaFlagsOriginal = 4
	ctaFlagsReply    = 5
	flagLiberal      = 8 // IP_CT_TCP_FLAG_BE_LIBERAL
	subsystem        = unix.NFNL_SUBSYS_CTNETLINK << 8
	messageNew       = subsystem     // IPCTNL_MSG_CT_NEW
	messageGet       = subsystem + 1 // IPCTNL_MSG_CT_GET
)

// keepConnections makes the present TCP entries of conntrack accept what their windows do not explain. Conntrack has
// not seen the packets of the cache, so without this it would call the next packets of these connections invalid once
// nf_conntrack_tcp_be_liberal is 0, and rules such as kube-proxy's would drop them for good.
func keepConnections() error {
	all, err := netns.List(func() ([][]byte, error) {
		req := nl.NewNetlinkRequest(messageGet, unix.NLM_F_DUMP)
		req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC})
		return req.Execute(unix.NETLINK_NETFILTER, 0)
	})
	if err != nil {
		return fmt.Errorf("list the conntrack entries: %w", err)
	}
	for _, one := range all {
		if err := keepConnection(one); err != nil {
			return fmt.Errorf("change a conntrack entry: %w", err)
		}
	}
	return nil
}

func keepConnection(entry []byte) error {
	if len(entry) < nl.SizeofNfgenmsg {
		return fmt.Errorf("a message of %d bytes", len(entry))
	}
	list, err := nl.ParseRouteAttr(entry[nl.SizeofNfgenmsg:])
	if err != nil {
		return err
	}
	req := nl.NewNetlinkRequest(messageNew, unix.NLM_F_ACK)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: entry[0]})
	tcp := false
	for _, a := range list {
		switch a.Attr.Type & nl.NLA_TYPE_MASK {
		case ctaTupleOrig:
			req.AddData(nl.NewRtAttr(ctaTupleOrig|unix.NLA_F_NESTED, a.Value))
		case ctaZone:
			req.AddData(nl.NewRtAttr(ctaZone, a.Value))
		case ctaProtoInfo:
			info, err := nl.ParseRouteAttr(a.Value)
			if err != nil {
				return err
			}
			tcp = len(info) > 0 && info[0].Attr.Type&nl.NLA_TYPE_MASK == ctaTCP
		}
	}
	if !tcp {
		return nil
	}
	info := nl.NewRtAttr(ctaProtoInfo|unix.NLA_F_NESTED, nil)
	flags := info.AddRtAttr(ctaTCP|unix.NLA_F_NESTED, nil)
	flags.AddRtAttr(ctaFlagsOriginal, []byte{flagLiberal, flagLiberal})
	flags.AddRtAttr(ctaFlagsReply, []byte{flagLiberal, flagLiberal})
	req.AddData(info)
	if _, err := req.Execute(unix.NETLINK_NETFILTER, 0); !errors.Is(err, unix.ENOENT) { // the entry has expired
		return err
	}
	return nil
}

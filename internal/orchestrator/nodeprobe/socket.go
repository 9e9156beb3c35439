package nodeprobe

import (
	"errors"
	"net"
	"os"

	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"
)

const receiveBuffer = 4 << 20 // bytes

// openSocket opens a socket for ICMPv6 echo: a ping socket, which needs no privilege but that of its group, or a raw
// one, which needs CAP_NET_RAW.
func openSocket() (c net.PacketConn, raw bool, err error) {
	for _, kind := range []int{unix.SOCK_DGRAM, unix.SOCK_RAW} {
		raw = kind == unix.SOCK_RAW
		c, failed := openKind(kind)
		if failed == nil {
			return c, raw, nil
		}
		err = errors.Join(err, failed)
	}
	return nil, false, err
}

func openKind(kind int) (net.PacketConn, error) {
	fd, err := unix.Socket(unix.AF_INET6, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_ICMPV6)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	f := os.NewFile(uintptr(fd), "icmpv6")
	defer f.Close() // c has a copy
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer) != nil {
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBuffer) // up to net.core.rmem_max
	}
	if kind == unix.SOCK_RAW {
		if err := unix.SetsockoptICMPv6Filter(fd, unix.SOL_ICMPV6, unix.ICMPV6_FILTER, echoReplies()); err != nil {
			return nil, os.NewSyscallError("setsockopt", err)
		}
	}
	return net.FilePacketConn(f)
}

// echoReplies is a filter that blocks all messages but echo replies.
func echoReplies() *unix.ICMPv6Filter {
	var filter unix.ICMPv6Filter
	for i := range filter.Data {
		filter.Data[i] = ^uint32(0)
	}
	kind := int(ipv6.ICMPTypeEchoReply)
	filter.Data[kind>>5] &^= 1 << (kind & 31)
	return &filter
}

package netns

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"runtime"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Ethtool runs a command that reads or writes one number, in the namespace of the thread.
func Ethtool(device string, command, value uint32) (uint32, error) {
	request := words(command, value)
	err := ethtool(device, request)
	return binary.NativeEndian.Uint32(request[4:]), err
}

// featureSet is ETH_SS_FEATURES of linux/ethtool.h; its strings have 32 bytes.
const (
	featureSet    = 4
	featureString = 32
)

// SetFeature turns a feature of a device on or off, in the namespace of the thread, as `ethtool -K` does.
func SetFeature(device, name string, on bool) error {
	count := words(unix.ETHTOOL_GSSET_INFO, 0, 1<<featureSet, 0, 0)
	if err := ethtool(device, count); err != nil {
		return err
	}
	n := int(binary.NativeEndian.Uint32(count[16:]))
	names := append(words(unix.ETHTOOL_GSTRINGS, featureSet, uint32(n)), make([]byte, n*featureString)...)
	if err := ethtool(device, names); err != nil {
		return err
	}
	var all []string
	for s := range slices.Chunk(names[12:], featureString) {
		all = append(all, string(bytes.TrimRight(s, "\x00")))
	}
	bit := slices.Index(all, name)
	if bit < 0 {
		return fmt.Errorf("%s has no feature %s", device, name)
	}
	blocks := make([]uint32, 2*((n+31)/32)) // for each 32 features those to be changed, and their values
	blocks[bit/32*2] = 1 << (bit % 32)
	if on {
		blocks[bit/32*2+1] = 1 << (bit % 32)
	}
	return ethtool(device, append(words(unix.ETHTOOL_SFEATURES, uint32(len(blocks)/2)), words(blocks...)...))
}

func words(values ...uint32) (b []byte) {
	for _, v := range values {
		b = binary.NativeEndian.AppendUint32(b, v)
	}
	return b
}

func ethtool(device string, request []byte) error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	ifr := struct {
		name    [unix.IFNAMSIZ]byte
		request unsafe.Pointer
		_       [16]byte
	}{request: unsafe.Pointer(&request[0])}
	copy(ifr.name[:unix.IFNAMSIZ-1], device)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(s), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&ifr)))
	runtime.KeepAlive(request)
	if errno != 0 {
		return fmt.Errorf("ethtool command %#x on %s: %w", request[:4], device, errno)
	}
	return nil
}

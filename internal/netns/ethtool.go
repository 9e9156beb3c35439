package netns

import (
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Ethtool runs a command that reads or writes one number, in the namespace of the thread.
func Ethtool(device string, command, value uint32) (uint32, error) {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(s)
	request := struct{ command, value uint32 }{command, value}
	ifr := struct {
		name    [unix.IFNAMSIZ]byte
		request unsafe.Pointer
		_       [16]byte
	}{request: unsafe.Pointer(&request)}
	copy(ifr.name[:unix.IFNAMSIZ-1], device)
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(s), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&ifr)))
	runtime.KeepAlive(&request)
	if errno != 0 {
		return 0, fmt.Errorf("ethtool command %#x on %s: %w", command, device, errno)
	}
	return request.value, nil
}

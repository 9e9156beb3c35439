package cniclient

import (
	"syscall"
	"unicode/utf8"
	"unsafe"
)

// view returns a string that shares the bytes of text.
func view(text []byte) string { return unsafe.String(unsafe.SliceData(text), len(text)) }

// add appends text as far as out has capacity. The function append would allocate memory.
func add(out []byte, text string) []byte {
	return out[:len(out)+copy(out[len(out):cap(out)], text)]
}

func addRune(out []byte, r rune) []byte {
	if cap(out)-len(out) < utf8.UTFMax {
		return out
	}
	return out[:len(out)+utf8.EncodeRune(out[len(out):cap(out)], r)]
}

// describe is like Errno.Error, but allocates no memory for numbers without a text.
func (c *Call) describe(err syscall.Errno) string {
	switch {
	case err == syscall.ETIMEDOUT:
		return view(add(add(add(c.why[:0], "timeout after "), timeout), " seconds"))
	case err != 0 && err != 41 && err != 58 && err <= syscall.ERFKILL: // Go's table of texts, with its gaps
		return err.Error()
	}
	var digits [20]byte
	i := len(digits)
	for n := err; n > 0; n /= 10 {
		i--
		digits[i] = '0' + byte(n%10)
	}
	return view(add(add(c.why[:0], "errno "), view(digits[i:])))
}

// escape appends the first maxText bytes of text to a JSON string. out has room for them.
func escape(out []byte, text string) []byte {
	const hex = "0123456789abcdef"
	for _, r := range text[:min(len(text), maxText)] { // invalid UTF-8 becomes U+FFFD
		switch {
		case r == '"' || r == '\\':
			out = addRune(add(out, `\`), r)
		case r < ' ':
			out = add(add(add(out, `\u00`), hex[r>>4:][:1]), hex[r&15:][:1])
		default:
			out = addRune(out, r)
		}
	}
	return out
}

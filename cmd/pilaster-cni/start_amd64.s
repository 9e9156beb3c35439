#include "textflag.h"

// Compiled code reads the pointer to its goroutine 8 bytes below the address in FS.
TEXT ·start(SB), NOSPLIT|NOFRAME, $0
	MOVQ SP, BX
	LEAQ ·goroutine(SB), AX
	MOVQ AX, 0(AX)
	LEAQ 8(AX), SI
	MOVQ $0x1002, DI // ARCH_SET_FS
	MOVQ $158, AX    // arch_prctl
	SYSCALL
	SUBQ $16, SP
	MOVQ BX, 0(SP)
	CALL ·begin(SB)
	INT  $3
